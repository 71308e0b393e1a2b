package kvgrpc

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"time"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

const (
	firstPause   = 100 * time.Millisecond
	longestPause = 2 * time.Second
	// After so long without a failure the next one is the first again.
	calm = time.Minute
	// A publisher that asks for more time is asked again all the same.
	longestAsked = time.Minute
	// Heartbeats come each second: a publisher that is idle for so long is taken for gone.
	idleTimeout = 5 * time.Second
)

// Stream names what to follow. Engine may be empty where the server publishes exactly one stream.
type Stream struct {
	Engine string
	DP     uint32
}

// Item is a Void, Reset, Events, Current or Failed.
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

// Failed says that a call broke, was refused or said what cannot be, and that another one follows after a pause: what is known
// stays, unless Void came before. FailureOf(Cause) has the reason, where a server named one. Lasting is what time alone can
// hardly mend (a wrong name, no permission): a person should hear of it. Whoever would rather end leaves.
type Failed struct {
	Cause   error
	Lasting bool
}

func (Void) item()    {}
func (Reset) item()   {}
func (Events) item()  {}
func (Current) item() {}
func (Failed) item()  {}

// ErrDiffers is the cause of a Void or Failed where a Cache came to another digest than its publisher.
var ErrDiffers = errors.New("a digest of the publisher's is not that of its events")

var (
	errSilent = fmt.Errorf("nothing came for %s", idleTimeout)
	errLeft   = errors.New("nobody reads on")
)

// Watch follows a stream until ctx ends, over breaks and restarts.
//
// It begins with a snapshot, goes on behind the last batch where a connection broke, and takes another snapshot where the
// log moved on or another one began; each snapshot begins with Reset. No failure ends it: each pause begins with Failed.
func Watch(ctx context.Context, client kvgrpcv1.EventServiceClient, stream Stream) iter.Seq[Item] {
	return func(yield func(Item) bool) {
		(&watcher{client: client, stream: stream, yield: yield, snapshots: true}).run(ctx)
	}
}

type watcher struct {
	client kvgrpcv1.EventServiceClient
	stream Stream
	yield  func(Item) bool
	// Hears every item before it is yielded, and finds differences; nil: nobody.
	cache interface{ Hear(Item) Verdict }
	// What PrefixIndex sees of calls; nil: nobody looks.
	observer  observer
	snapshots bool
	stopped   bool
	// Snapshots name blocks alone, where the publisher can leave out the rest.
	withoutTokens bool
	pause         time.Duration
	failedAt      time.Time
	// A call said something, this one or one before it.
	begun bool
	// What the call asked for: to go on from the cursor, or a snapshot; neither is the oldest batch.
	resumes, askedSnapshot bool
	// The cursor: what comes next in which log. Known once a snapshot, or the beginning of a log, is complete.
	known bool
	logID string
	next  uint64
}

// observer is told of calls before what they say is made items: a call begins, and each message of it.
type observer interface {
	called()
	came(*kvgrpcv1.WatchResponse)
}

func (watch *watcher) run(ctx context.Context) {
	for ctx.Err() == nil && !watch.stopped {
		err := watch.once(ctx)
		if watch.stopped || ctx.Err() != nil {
			return
		}
		pause := watch.failed(err)
		if watch.stopped || pause == 0 {
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// once makes one call and tells what it says. The error is why it ended, never nil.
func (watch *watcher) once(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// The call itself waits for a connection: of somebody who never answers, too.
	alive := time.AfterFunc(idleTimeout, func() { cancel(errSilent) })
	defer alive.Stop()
	if watch.observer != nil {
		watch.observer.called()
	}
	call, err := watch.client.Watch(ctx, watch.request())
	if err != nil {
		return orSilent(ctx, err)
	}
	for !watch.stopped {
		alive.Reset(idleTimeout)
		message, err := call.Recv()
		// What the reader takes for a message is not the publisher's silence.
		alive.Stop()
		if err != nil {
			return orSilent(ctx, err)
		}
		watch.begun = true
		if watch.observer != nil {
			watch.observer.came(message)
		}
		if err := watch.hear(message); err != nil {
			return err
		}
	}
	return errLeft
}

// orSilent names what we ended ourselves.
func orSilent(ctx context.Context, err error) error {
	if context.Cause(ctx) == errSilent {
		return errSilent
	}
	return err
}

func (watch *watcher) request() *kvgrpcv1.WatchRequest {
	request := &kvgrpcv1.WatchRequest{
		Engine: watch.stream.Engine, Dp: watch.stream.DP, WithoutTokens: watch.withoutTokens,
	}
	watch.resumes, watch.askedSnapshot = watch.known, watch.snapshots && !watch.known
	switch {
	case watch.known:
		request.Mode, request.LogId = kvgrpcv1.WatchMode_WATCH_MODE_TAIL, watch.logID
		request.FromSequence = &watch.next
	case watch.askedSnapshot:
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
	return watch.beginAt(begin.FirstSequence, begin.FirstSequence == 0)
}

// beginAt begins empty where no snapshot is kept.
func (watch *watcher) beginAt(next uint64, whole bool) error {
	watch.known, watch.next = true, next
	if err := watch.tell(Reset{watch.logID, whole}); err != nil {
		return err
	}
	return watch.tell(Events{LogID: watch.logID, NextSequence: next, Complete: true})
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
			// What it said is lost: only a snapshot knows. Where none is kept, asking again says the same.
			watch.void(err)
			if watch.snapshots {
				return err
			}
			if err := watch.beginAt(raw.FirstSequence+uint64(index)+1, false); err != nil {
				return err
			}
			continue
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
		return ErrDiffers
	}
	watch.stopped = !watch.yield(item)
	return nil
}

func (watch *watcher) void(cause error) {
	watch.known = false
	_ = watch.tell(Void{cause})
}

// failed decides what the end of a call means, and how long to wait before the next; docs/followers.md has the table.
func (watch *watcher) failed(err error) time.Duration {
	failure, isStatus := FailureOf(err)
	switch failure.Reason {
	case kvgrpcv1.ErrorReason_ERROR_REASON_STALE_LOG, kvgrpcv1.ErrorReason_ERROR_REASON_EVENTS_SEQUENCE_IN_FUTURE:
		watch.void(err)
		watch.logID = ""
		fallthrough
	case kvgrpcv1.ErrorReason_ERROR_REASON_EVENTS_COMPACTED:
		watch.known, watch.snapshots = false, true
		if watch.resumes {
			return 0
		}
		isStatus = false
	}
	if watch.askedSnapshot && failure.keepsNone() {
		watch.snapshots = false
		return 0
	}
	// Whoever answers next may keep snapshots.
	watch.snapshots = watch.snapshots || !watch.known
	_ = watch.tell(Failed{err, isStatus && failure.isLasting(watch.begun)})
	return min(failure.RetryAfter, longestAsked) + watch.nextPause()
}

// nextPause doubles from failure to failure.
func (watch *watcher) nextPause() time.Duration {
	now := time.Now()
	if now.Sub(watch.failedAt) > calm {
		watch.pause = 0
	}
	watch.failedAt, watch.pause = now, min(max(2*watch.pause, firstPause), longestPause)
	return watch.pause/2 + rand.N(watch.pause/2)
}
