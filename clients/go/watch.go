package kvgrpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

const (
	firstPause   = 100 * time.Millisecond
	longestPause = 2 * time.Second
	// After so long without a failure the next one is the first again.
	calm = time.Minute
	// Heartbeats come each second: a publisher that is idle for so long is taken for gone.
	idleTimeout = 5 * time.Second
)

// Stream names what to follow. Engine may be empty where the server publishes exactly one stream.
type Stream struct {
	Engine string
	DP     uint32
}

// Item is a Void, Reset, Events or Current.
type Item interface{ item() }

// Void says that what was known is no state of the cache any more: another log is current, a batch cannot be read, or a
// digest differs. Nothing is known until what follows the next Reset is Complete.
type Void struct{ Cause error }

// Reset says that a state follows: from an empty cache on, what it holds once Events are Complete. Until then what was known
// of the same log is old, and was true: show it until then.
type Reset struct {
	LogID string
	// Whole is false where the server keeps no snapshot and its log began before what can be read.
	Whole bool
}

// Events are those of one batch, or of a part of a snapshot. All batches before NextSequence are in, once Complete.
type Events struct {
	LogID        string
	NextSequence uint64
	Events       []Event
	// Complete is false within a snapshot: what it said so far is no state of the cache yet.
	Complete bool
	// State is what a snapshot must come to, with its last part; nil otherwise.
	State *kvgrpcv1.StateDigest
}

// Current says that all batches before NextSequence were told, and how many the publisher has beyond: 0, but under load.
// State is the publisher's digest of the same or an earlier sequence; nil where it keeps none.
type Current struct {
	LogID        string
	NextSequence uint64
	State        *kvgrpcv1.StateDigest
	Lag          uint64
}

func (Void) item()    {}
func (Reset) item()   {}
func (Events) item()  {}
func (Current) item() {}

var errDiffers = errors.New("a digest of the publisher's is not that of its events")

// Watch follows a stream until ctx ends, over breaks and restarts.
//
// It begins with a snapshot, goes on behind the last batch where a connection broke, and takes another snapshot where the
// log moved on or another one began; each snapshot begins with Reset. It yields an error, and ends, for what repeating
// cannot mend (no such stream, no permission).
func Watch(ctx context.Context, client kvgrpcv1.EventServiceClient, stream Stream) iter.Seq2[Item, error] {
	return func(yield func(Item, error) bool) {
		(&watcher{client: client, stream: stream, yield: yield, snapshots: true}).run(ctx)
	}
}

type watcher struct {
	client    kvgrpcv1.EventServiceClient
	stream    Stream
	yield     func(Item, error) bool
	cache     *Cache
	snapshots bool
	stopped   bool
	pause     time.Duration
	failedAt  time.Time
	// A call said something, this one or one before it.
	begun bool
	// The cursor: what comes next in which log. Known once a snapshot, or the beginning of a log, is complete.
	known bool
	logID string
	next  uint64
}

func (watch *watcher) run(ctx context.Context) {
	for ctx.Err() == nil && !watch.stopped {
		err := watch.once(ctx)
		if watch.stopped || ctx.Err() != nil {
			return
		}
		if !watch.mayGoOn(err) {
			watch.yield(nil, err)
			return
		}
		if watch.stopped {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(watch.pause/2 + rand.N(watch.pause/2)):
		}
	}
}

// once makes one call and tells what it says. The error is why it ended, never nil.
func (watch *watcher) once(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The call itself waits for a connection: of somebody who never answers, too.
	alive := time.AfterFunc(idleTimeout, cancel)
	defer alive.Stop()
	call, err := watch.client.Watch(ctx, watch.request())
	if err != nil {
		return err
	}
	for !watch.stopped {
		alive.Reset(idleTimeout)
		message, err := call.Recv()
		// What the reader takes for a message is not the publisher's silence.
		alive.Stop()
		if err != nil {
			return err
		}
		watch.begun = true
		if err := watch.hear(message); err != nil {
			return err
		}
	}
	return context.Canceled
}

func (watch *watcher) request() *kvgrpcv1.WatchRequest {
	request := &kvgrpcv1.WatchRequest{Engine: watch.stream.Engine, Dp: watch.stream.DP}
	switch {
	case watch.known:
		request.Mode, request.LogId = kvgrpcv1.WatchMode_WATCH_MODE_TAIL, watch.logID
		request.FromSequence = &watch.next
	case watch.snapshots:
		request.Mode = kvgrpcv1.WatchMode_WATCH_MODE_SNAPSHOT
	default:
		request.Mode = kvgrpcv1.WatchMode_WATCH_MODE_TAIL
	}
	return request
}

func (watch *watcher) hear(message *kvgrpcv1.WatchResponse) error {
	switch kind := message.Kind.(type) {
	case *kvgrpcv1.WatchResponse_Begin:
		return watch.hearBegin(kind.Begin)
	case *kvgrpcv1.WatchResponse_Snapshot:
		return watch.hearSnapshot(kind.Snapshot)
	case *kvgrpcv1.WatchResponse_Raw:
		return watch.hearBatches(kind.Raw)
	case *kvgrpcv1.WatchResponse_Dropped:
		// AllBlocksCleared follows in the log.
		if err := watch.reaches(kind.Dropped.FirstSequence); err != nil {
			return err
		}
		watch.next = max(watch.next, kind.Dropped.LastSequence+1)
	case *kvgrpcv1.WatchResponse_Heartbeat:
		return watch.hearHeartbeat(kind.Heartbeat)
	}
	return nil
}

func (watch *watcher) hearBegin(begin *kvgrpcv1.WatchBegin) error {
	before, resumed := watch.logID, watch.known
	watch.logID = begin.GetStream().GetLogId()
	if before != "" && before != watch.logID {
		err := fmt.Errorf("log %s is over, %s is current", before, watch.logID)
		watch.void(err)
		if resumed {
			return err
		}
	}
	if watch.known || watch.snapshots {
		return nil
	}
	watch.known, watch.next = true, begin.FirstSequence
	if err := watch.tell(Reset{watch.logID, begin.FirstSequence == 0}); err != nil {
		return err
	}
	return watch.tell(Events{LogID: watch.logID, NextSequence: watch.next, Complete: true})
}

func (watch *watcher) hearSnapshot(part *kvgrpcv1.SnapshotPart) error {
	if part.Index == 0 {
		watch.known = false
		if err := watch.tell(Reset{watch.logID, true}); err != nil {
			return err
		}
	}
	if watch.known {
		return nil
	}
	var events []Event
	for _, payload := range part.Payloads {
		batch, err := DecodeBatch(payload)
		if err != nil {
			return err
		}
		events = append(events, batch.Events...)
	}
	told := Events{LogID: watch.logID, NextSequence: part.NextSequence, Events: events, Complete: part.Last, State: part.State}
	if err := watch.tell(told); err != nil {
		return err
	}
	watch.known, watch.next = part.Last, part.NextSequence
	if part.State == nil {
		return nil
	}
	return watch.tell(Current{LogID: watch.logID, NextSequence: part.NextSequence, State: part.State})
}

func (watch *watcher) hearBatches(raw *kvgrpcv1.RawBatches) error {
	if err := watch.reaches(raw.FirstSequence); err != nil {
		return err
	}
	for index, payload := range raw.Payloads {
		if raw.FirstSequence+uint64(index) < watch.next {
			continue
		}
		batch, err := DecodeBatch(payload)
		if err != nil {
			// What it said is lost: only a snapshot knows.
			watch.void(err)
			return err
		}
		watch.next++
		told := Events{LogID: watch.logID, NextSequence: watch.next, Events: batch.Events, Complete: true}
		if err := watch.tell(told); err != nil {
			return err
		}
	}
	return nil
}

func (watch *watcher) hearHeartbeat(heartbeat *kvgrpcv1.WatchHeartbeat) error {
	if !watch.known {
		return nil
	}
	lag := max(heartbeat.NextSequence, watch.next) - watch.next
	err := watch.tell(Current{watch.logID, watch.next, heartbeat.State, lag})
	if err != nil {
		watch.void(err)
	}
	return err
}

// reaches fails where batches between the cursor and first are missing. What is known stays true, of a moment ago.
func (watch *watcher) reaches(first uint64) error {
	if watch.known && first <= watch.next {
		return nil
	}
	watch.known = false
	return fmt.Errorf("a Watch went from %d to %d", watch.next, first)
}

// tell fails where the cache differs from a digest of the publisher's; that item is not yielded.
func (watch *watcher) tell(item Item) error {
	if watch.stopped {
		return nil
	}
	if watch.cache != nil && watch.cache.Hear(item) == Different {
		watch.known = false
		return errDiffers
	}
	watch.stopped = !watch.yield(item, nil)
	return nil
}

func (watch *watcher) void(cause error) {
	watch.known = false
	_ = watch.tell(Void{cause})
}

// mayGoOn decides what the end of a call means, and how long to wait before the next.
func (watch *watcher) mayGoOn(err error) bool {
	now := time.Now()
	if now.Sub(watch.failedAt) > calm {
		watch.pause = 0
	}
	watch.failedAt, watch.pause = now, min(max(2*watch.pause, firstPause), longestPause)
	failure, isStatus := FailureOf(err)
	switch failure.Reason {
	case kvgrpcv1.ErrorReason_ERROR_REASON_STALE_LOG, kvgrpcv1.ErrorReason_ERROR_REASON_EVENTS_SEQUENCE_IN_FUTURE:
		watch.void(err)
		watch.logID, watch.snapshots = "", true
		return true
	case kvgrpcv1.ErrorReason_ERROR_REASON_EVENTS_COMPACTED:
		watch.known, watch.snapshots = false, true
		return true
	case kvgrpcv1.ErrorReason_ERROR_REASON_FEATURE_DISABLED, kvgrpcv1.ErrorReason_ERROR_REASON_INVALID_REQUEST:
		// A server that keeps no snapshot, or is older than snapshots.
		tried := watch.snapshots && !watch.known
		watch.snapshots = false
		return tried
	}
	// Whoever answers next may keep snapshots.
	watch.snapshots = watch.snapshots || !watch.known
	if !isStatus {
		return errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) || !watch.known
	}
	// Half of a pause at least is waited.
	watch.pause = max(watch.pause, 2*failure.RetryAfter)
	switch failure.Code {
	case codes.Canceled, codes.Aborted, codes.DeadlineExceeded:
		// What the idle timeout cancelled, or somebody between us and the publisher.
		return true
	case codes.Internal, codes.Unknown:
		// A stream that a proxy reset, a server that failed; before anything was ever said it is what answers there.
		return watch.begun
	}
	return failure.MayRepeat()
}
