package kvgrpc

import (
	"context"
	"maps"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// An engine that nobody reaches must not attract requests for ever.
const hideAfter = 30 * time.Second

// cacheKey names one cache.
type cacheKey struct {
	engine string
	dp     uint32
}

// cachePlace is where a cache is asked for, and what the registry says of its rank; "": not known.
type cachePlace struct {
	address string
	model   string
	labels  map[string]string
}

func (place cachePlace) is(other cachePlace) bool {
	return place.address == other.address && place.model == other.model && maps.Equal(place.labels, other.labels)
}

// hasLabels says whether all of these are there.
func (place cachePlace) hasLabels(labels map[string]string) bool {
	for name, value := range labels {
		if known, is := place.labels[name]; !is || known != value {
			return false
		}
	}
	return true
}

// followed is one cache of a PrefixIndex: what it holds, and how fresh that is. What it shows is a state that the cache had.
type followed struct {
	cacheKey
	cachePlace
	stop context.CancelFunc

	mutex sync.RWMutex
	cache Cache
	// The cache shows a state, which all batches before next led to.
	known bool
	next  uint64
	// The log that was begun last, and the sequence of its next batch as last told.
	logID    string
	upcoming uint64
	// A call said something, and goes on.
	begun            bool
	heardAt, exactAt time.Time
	unreachableSince time.Time
	lastError        error
}

// run follows the cache until ctx ends.
func (followed *followed) run(ctx context.Context, client kvgrpcv1.EventServiceClient) {
	watch := &watcher{
		client:    client,
		stream:    Stream{followed.engine, followed.dp},
		yield:     func(Item) bool { return true },
		cache:     followed,
		observer:  followed,
		snapshots: true,
		// What it keeps are names of blocks.
		withoutTokens: true,
	}
	watch.run(ctx)
}

// Hear takes an item of the Watch. For the watcher.
func (followed *followed) Hear(item Item) Verdict {
	// A part of a snapshot takes milliseconds, and nobody else looks at what comes of it before it is complete.
	if events, isEvents := item.(Events); isEvents && followed.cache.shadow != nil {
		followed.cache.shadow.Apply(events.Events)
		events.Events = nil
		item = events
	}
	followed.mutex.Lock()
	defer followed.mutex.Unlock()
	switch item := item.(type) {
	case Void:
		followed.known = false
	case Reset:
		followed.known = followed.known && item.LogID == followed.cache.logID
	case Failed:
		followed.noteExact()
		followed.begun, followed.lastError = false, item.Cause
		if followed.unreachableSince.IsZero() {
			followed.unreachableSince = time.Now()
		}
	}
	verdict := followed.cache.Hear(item)
	switch item := item.(type) {
	case Events:
		if item.Complete && verdict != Different {
			followed.known, followed.next = true, item.NextSequence
			followed.upcoming = max(followed.upcoming, followed.next)
		}
	case Current:
		if verdict == Different {
			followed.known = false
			break
		}
		followed.next = item.NextSequence
	}
	return verdict
}

// called says that a call begins. For the watcher.
func (followed *followed) called() {
	followed.mutex.Lock()
	defer followed.mutex.Unlock()
	followed.noteExact()
	followed.begun = false
	// What a call before it began to say is not gone on with.
	followed.cache.shadow = nil
}

// came sees each message before it is heard: whatever another log makes untrue is shown no more. For the watcher.
func (followed *followed) came(message *kvgrpcv1.WatchResponse) {
	followed.mutex.Lock()
	defer followed.mutex.Unlock()
	followed.noteExact()
	followed.heardAt = time.Now()
	if begin := message.GetBegin(); begin != nil {
		stream := begin.GetStream()
		if stream.GetLogId() != followed.logID {
			followed.logID, followed.upcoming, followed.known = stream.GetLogId(), 0, false
		}
		followed.begun, followed.unreachableSince = true, time.Time{}
		followed.upcoming = max(followed.upcoming, stream.GetNextSequence())
	}
	followed.upcoming = max(followed.upcoming, message.GetHeartbeat().GetNextSequence())
}

func (followed *followed) noteExact() {
	followed.exactAt = followed.exact()
}

// exact is when the contents were last known to be those of the cache; zero: never.
func (followed *followed) exact() time.Time {
	if followed.state() == kvgrpcv1.IndexSourceState_INDEX_SOURCE_STATE_CURRENT {
		return followed.heardAt
	}
	return followed.exactAt
}

func (followed *followed) state() kvgrpcv1.IndexSourceState {
	switch {
	case followed.begun && followed.cache.shadow != nil:
		return kvgrpcv1.IndexSourceState_INDEX_SOURCE_STATE_REBUILDING
	case !followed.begun || !followed.known:
		return kvgrpcv1.IndexSourceState_INDEX_SOURCE_STATE_CONNECTING
	case followed.cache.doubtful:
		return kvgrpcv1.IndexSourceState_INDEX_SOURCE_STATE_DOUBTFUL
	case followed.next < followed.upcoming:
		return kvgrpcv1.IndexSourceState_INDEX_SOURCE_STATE_CATCHING_UP
	}
	return kvgrpcv1.IndexSourceState_INDEX_SOURCE_STATE_CURRENT
}

func (followed *followed) isShown(now time.Time) bool {
	return followed.known && (followed.unreachableSince.IsZero() || now.Sub(followed.unreachableSince) < hideAfter)
}

func (followed *followed) freshness(now time.Time) *kvgrpcv1.Freshness {
	told := &kvgrpcv1.Freshness{State: followed.state(), LogId: followed.logID, LagBatches: followed.upcoming}
	if !followed.heardAt.IsZero() {
		told.IdleTime = durationpb.New(max(0, now.Sub(followed.heardAt)))
	}
	if followed.known {
		told.NextSequence, told.LagBatches = followed.next, max(followed.upcoming, followed.next)-followed.next
		told.Whole = followed.cache.Whole()
	}
	return told
}

// score answers for this cache; nil: it does not hold the first block, or is not known as freshly as is asked.
func (followed *followed) score(question Question, now time.Time) *kvgrpcv1.CacheScore {
	followed.mutex.RLock()
	defer followed.mutex.RUnlock()
	if !followed.isShown(now) {
		return nil
	}
	exact := followed.exact()
	if question.MaxStaleness > 0 && (exact.IsZero() || now.Sub(exact) > question.MaxStaleness) {
		return nil
	}
	hashes, stride, step := question.fitting(followed.cache.pageTokens)
	ends := followed.cache.leading(hashes, stride, step)
	if ends[inStore] == 0 {
		return nil
	}
	return &kvgrpcv1.CacheScore{
		Engine:       followed.engine,
		Dp:           followed.dp,
		DeviceBlocks: uint32(ends[onDevice]),
		HostBlocks:   uint32(ends[onHost]),
		DiskBlocks:   uint32(ends[onDisk]),
		Blocks:       uint32(ends[inStore]),
		PageTokens:   uint32(followed.cache.pageTokens),
		Freshness:    followed.freshness(now),
	}
}

func (followed *followed) source(now time.Time) Source {
	followed.mutex.RLock()
	defer followed.mutex.RUnlock()
	source := Source{
		Engine: followed.engine, DP: followed.dp, Address: followed.address, Model: followed.model, Labels: maps.Clone(followed.labels),
		Freshness: followed.freshness(now), LastError: followed.lastError,
	}
	if followed.known {
		source.Blocks, source.PageTokens = followed.cache.Blocks(), followed.cache.pageTokens
	}
	return source
}

// isConnecting says whether nobody answers for it now.
func (followed *followed) isConnecting() bool {
	followed.mutex.RLock()
	defer followed.mutex.RUnlock()
	return followed.state() == kvgrpcv1.IndexSourceState_INDEX_SOURCE_STATE_CONNECTING
}
