package kvgrpc

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// world is a publisher that goes on, compacts its log, restarts and loses connections, as its seed says. It keeps every state
// that each of its logs ever had.
type world struct {
	kvgrpcv1.EventServiceClient
	random   *rand.Rand
	log      int
	oldest   uint64
	payloads [][]byte
	cache    Cache
	states   map[string]map[string]bool
	// Its follower was told that its log is over, and has said nothing since.
	stale bool
}

func (world *world) name() string { return fmt.Sprint("log", world.log) }

func (world *world) restart() {
	world.log++
	world.oldest, world.payloads, world.cache = 0, nil, Cache{}
	world.states[world.name()] = map[string]bool{}
	// A block that stays: from here on an empty cache is no state of this one.
	world.add(storedPayload(100))
}

func (world *world) publish() {
	hash := byte(world.random.IntN(100))
	written := storedPayload(hash)
	if world.random.IntN(2) == 0 {
		written = payload(hash)
	}
	world.add(written)
}

func (world *world) add(written []byte) {
	batch, err := DecodeBatch(written)
	if err != nil {
		panic(err)
	}
	world.payloads = append(world.payloads, written)
	world.cache.Apply(batch.Events)
	world.states[world.name()][world.cache.shown()] = true
}

const nothing = "map[]"

func (cache *Cache) shown() string { return fmt.Sprint(cache.copies[Place{Medium: "GPU"}]) }

func (world *world) next() uint64 { return uint64(len(world.payloads)) }

func (world *world) live() {
	for range world.random.IntN(20) {
		world.publish()
	}
	switch world.random.IntN(6) {
	case 0:
		world.oldest = world.next()
	case 1:
		world.restart()
	}
}

func (world *world) Watch(
	_ context.Context, request *kvgrpcv1.WatchRequest, _ ...grpc.CallOption,
) (grpc.ServerStreamingClient[kvgrpcv1.WatchResponse], error) {
	world.live()
	from := request.GetFromSequence()
	if request.LogId != "" && request.LogId != world.name() {
		world.stale = true
		return nil, refusal(codes.Aborted, "STALE_LOG")
	}
	if request.FromSequence != nil && from < world.oldest {
		return nil, refusal(codes.OutOfRange, "EVENTS_COMPACTED")
	}
	call := &scriptedCall{answers: answers{end: status.Error(codes.Unavailable, "broken")}}
	call.said = append(call.said, begin(world.name(), world.next()))
	if request.Mode == kvgrpcv1.WatchMode_WATCH_MODE_SNAPSHOT {
		call.said = append(call.said, world.snapshot()...)
		from = world.next()
		for range world.random.IntN(5) {
			world.publish()
		}
	}
	for from < world.next() {
		count := min(1+world.random.Uint64N(3), world.next()-from)
		call.said = append(call.said, batches(from, world.payloads[from:from+count]...))
		from += count
	}
	call.said = append(call.said, heartbeat(world.next(), world.cache.digest()...))
	if world.random.IntN(3) > 0 {
		call.said = call.said[:1+world.random.IntN(len(call.said))]
	}
	return call, nil
}

func (world *world) snapshot() (parts []*kvgrpcv1.WatchResponse) {
	var hashes []byte
	for hash, copies := range world.cache.copies[Place{Medium: "GPU"}] {
		for range copies {
			hashes = append(hashes, byte(hash))
		}
	}
	state := &kvgrpcv1.StateDigest{NextSequence: world.next(), Tiers: world.cache.digest()}
	for index, hash := range hashes {
		parts = append(parts, storing(world.next(), uint32(index), false, hash, nil))
	}
	end := &kvgrpcv1.SnapshotPart{NextSequence: world.next(), Index: uint32(len(hashes)), Last: true, State: state}
	parts = append(parts, &kvgrpcv1.WatchResponse{Kind: &kvgrpcv1.WatchResponse_Snapshot{Snapshot: end}})
	if world.random.IntN(4) == 0 {
		// The log overtook this one: another one begins.
		return slices.Concat(parts[:world.random.IntN(len(parts))], parts)
	}
	return parts
}

// What is shown is a state that the cache really had, in the log that is not known to be over.
func TestWhatIsShownIsAlwaysAStateThatTheCacheHad(t *testing.T) {
	for seed := range uint64(50) {
		synctest.Test(t, func(t *testing.T) {
			world := &world{random: rand.New(rand.NewPCG(seed, 0)), states: map[string]map[string]bool{}}
			world.restart()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			var cache Cache
			exact, known := 0, false
			for item := range Follow(ctx, world, Stream{}, &cache) {
				switch item := item.(type) {
				case Void:
					known = false
				case Events:
					known = known || item.Complete
				}
				shown := cache.shown()
				if known && world.stale {
					t.Fatalf("seed %d: %s is over, and shown", seed, cache.logID)
				}
				world.stale = false
				if !known && shown != nothing || known && !world.states[cache.logID][shown] {
					t.Fatalf("seed %d, %T: %s shows %s", seed, item, cache.logID, shown)
				}
				if current, isCurrent := item.(Current); isCurrent && cache.Compare(current.State) == Equal {
					exact++
				}
			}
			if exact == 0 {
				t.Errorf("seed %d: it was never exact", seed)
			}
		})
	}
}
