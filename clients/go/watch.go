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
	// Heartbeats come each second: a publisher that is idle for so long is taken for gone.
	idleTimeout = 5 * time.Second
)

// Stream names what to follow. Engine may be empty where the server publishes exactly one stream.
type Stream struct {
	Engine string
	DP     uint32
}

// Item is a Reset, Events or Current.
type Item interface{ item() }

// Reset says that what was known is void: what follows, from an empty cache on, is what it holds.
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
	// Complete is false within a snapshot: what is known is no state of the cache yet.
	Complete bool
}

// Current says that all batches before NextSequence were told. State is the publisher's digest of the same or an earlier
// sequence; nil where it keeps none.
type Current struct {
	LogID        string
	NextSequence uint64
	State        *kvgrpcv1.StateDigest
}

func (Reset) item()   {}
func (Events) item()  {}
func (Current) item() {}

// Watch follows a stream until ctx ends, over breaks and restarts.
//
// It begins with a snapshot, goes on behind the last batch where a connection broke, and takes another snapshot where the
// log moved on or another one began; each snapshot begins with Reset. It yields an error, and ends, for what repeating
// cannot mend (no such stream, no permission).
func Watch(ctx context.Context, client kvgrpcv1.EventServiceClient, stream Stream) iter.Seq2[Item, error] {
	return func(yield func(Item, error) bool) {
		watch := watcher{client: client, stream: stream, yield: yield, snapshots: true}
		for ctx.Err() == nil && !watch.stopped {
			err := watch.once(ctx)
			if watch.stopped || ctx.Err() != nil {
				return
			}
			if !watch.mayGoOn(err) {
				yield(nil, err)
				return
			}
			if watch.pause > 0 {
				select {
				case <-ctx.Done():
				case <-time.After(watch.pause/2 + rand.N(watch.pause/2)):
				}
			}
		}
	}
}

type watcher struct {
	client    kvgrpcv1.EventServiceClient
	stream    Stream
	yield     func(Item, error) bool
	snapshots bool
	stopped   bool
	pause     time.Duration
	// The present call said something.
	begun bool
	// The cursor: what comes next in which log. Known once a snapshot, or the beginning of a log, is complete.
	known bool
	logID string
	next  uint64
}

// once makes one call and tells what it says. The error is why it ended, never nil.
func (watch *watcher) once(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	watch.begun = false
	call, err := watch.client.Watch(ctx, watch.request())
	if err != nil {
		return err
	}
	alive := time.AfterFunc(idleTimeout, cancel)
	defer alive.Stop()
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
		begin := kind.Begin
		watch.logID = begin.GetStream().GetLogId()
		if !watch.known && !watch.snapshots {
			watch.known, watch.next = true, begin.FirstSequence
			watch.tell(Reset{watch.logID, begin.FirstSequence == 0})
		}
	case *kvgrpcv1.WatchResponse_Snapshot:
		return watch.hearSnapshot(kind.Snapshot)
	case *kvgrpcv1.WatchResponse_Raw:
		return watch.hearBatches(kind.Raw)
	case *kvgrpcv1.WatchResponse_Dropped:
		// AllBlocksCleared follows in the log.
		watch.next = max(watch.next, kind.Dropped.LastSequence+1)
	case *kvgrpcv1.WatchResponse_Heartbeat:
		watch.pause = 0
		watch.tell(Current{watch.logID, kind.Heartbeat.NextSequence, kind.Heartbeat.State})
	}
	return nil
}

func (watch *watcher) hearSnapshot(part *kvgrpcv1.SnapshotPart) error {
	if part.Index == 0 {
		watch.known = false
		watch.tell(Reset{watch.logID, true})
	}
	var events []Event
	for _, payload := range part.Payloads {
		batch, err := DecodeBatch(payload)
		if err != nil {
			return err
		}
		events = append(events, batch.Events...)
	}
	watch.known, watch.next = part.Last, part.NextSequence
	watch.tell(Events{watch.logID, part.NextSequence, events, part.Last})
	if part.State != nil {
		watch.tell(Current{watch.logID, part.NextSequence, part.State})
	}
	return nil
}

func (watch *watcher) hearBatches(raw *kvgrpcv1.RawBatches) error {
	if raw.FirstSequence != watch.next {
		watch.known = false
		return fmt.Errorf("a Watch went from %d to %d", watch.next, raw.FirstSequence)
	}
	for _, payload := range raw.Payloads {
		batch, err := DecodeBatch(payload)
		if err != nil {
			// What it said is lost: only a snapshot knows.
			watch.known = false
			return err
		}
		watch.next++
		watch.tell(Events{watch.logID, watch.next, batch.Events, true})
	}
	return nil
}

func (watch *watcher) tell(item Item) {
	watch.stopped = watch.stopped || !watch.yield(item, nil)
}

// mayGoOn decides what the end of a call means, and how long to wait before the next.
func (watch *watcher) mayGoOn(err error) bool {
	watch.pause = min(max(2*watch.pause, firstPause), longestPause)
	failure, isStatus := FailureOf(err)
	if !isStatus {
		return errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) || !watch.known
	}
	switch failure.Reason {
	case kvgrpcv1.ErrorReason_ERROR_REASON_EVENTS_COMPACTED,
		kvgrpcv1.ErrorReason_ERROR_REASON_STALE_LOG,
		kvgrpcv1.ErrorReason_ERROR_REASON_EVENTS_SEQUENCE_IN_FUTURE:
		// Another log may be that of a publisher that keeps snapshots.
		watch.known, watch.snapshots = false, true
		return true
	case kvgrpcv1.ErrorReason_ERROR_REASON_FEATURE_DISABLED, kvgrpcv1.ErrorReason_ERROR_REASON_INVALID_REQUEST:
		// A server that keeps no snapshot, or is older than snapshots.
		tried := watch.snapshots && !watch.known
		watch.snapshots = false
		return tried
	}
	watch.pause = max(watch.pause, failure.RetryAfter)
	switch failure.Code {
	case codes.Canceled, codes.Aborted, codes.DeadlineExceeded:
		// What the idle timeout cancelled, or somebody between us and the publisher.
		return true
	case codes.Internal, codes.Unknown:
		// A stream that a proxy reset, a server that failed; before a call said anything it is what answers there.
		return watch.begun
	}
	return failure.MayRepeat()
}
