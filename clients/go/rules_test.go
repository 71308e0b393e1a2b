package kvgrpc

import (
	"context"
	"fmt"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// The rules of docs/followers.md, over calls that answer at once, in a time of their own.

type answers struct {
	said []*kvgrpcv1.WatchResponse
	end  error
	// Nothing comes, the call itself does not return: as with a host that vanished.
	silent bool
}

type scriptedClient struct {
	kvgrpcv1.EventServiceClient
	calls    []answers
	requests []*kvgrpcv1.WatchRequest
	at       []time.Time
}

type scriptedCall struct {
	grpc.ClientStream
	answers
}

func (client *scriptedClient) Watch(
	ctx context.Context, request *kvgrpcv1.WatchRequest, _ ...grpc.CallOption,
) (grpc.ServerStreamingClient[kvgrpcv1.WatchResponse], error) {
	client.requests, client.at = append(client.requests, request), append(client.at, time.Now())
	if len(client.calls) == 0 || client.calls[0].silent {
		client.calls = client.calls[min(1, len(client.calls)):]
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	call := &scriptedCall{answers: client.calls[0]}
	client.calls = client.calls[1:]
	return call, nil
}

func (call *scriptedCall) Recv() (*kvgrpcv1.WatchResponse, error) {
	if len(call.said) == 0 {
		if call.end == nil {
			return nil, io.EOF
		}
		return nil, call.end
	}
	message := call.said[0]
	call.said = call.said[1:]
	return message, nil
}

func said(end error, messages ...*kvgrpcv1.WatchResponse) answers {
	return answers{said: messages, end: end}
}

// storing is a part of a snapshot that holds one block more; its digest is right, or says nothing.
func storing(next uint64, index uint32, last bool, hash byte, state *kvgrpcv1.StateDigest) *kvgrpcv1.WatchResponse {
	return &kvgrpcv1.WatchResponse{Kind: &kvgrpcv1.WatchResponse_Snapshot{Snapshot: &kvgrpcv1.SnapshotPart{
		NextSequence: next, Index: index, Last: last, Payloads: [][]byte{storedPayload(hash)}, State: state,
	}}}
}

// [1.0, [["BlockStored", [hash], nil, nil, 1]], 0]
func storedPayload(hash byte) []byte {
	start := []byte{0x93, 0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0, 0x91, 0x95, 0xab}
	return append(append(start, "BlockStored"...), 0x91, hash, 0xc0, 0xc0, 1, 0)
}

func hole(first, last uint64) *kvgrpcv1.WatchResponse {
	return &kvgrpcv1.WatchResponse{Kind: &kvgrpcv1.WatchResponse_Dropped{
		Dropped: &kvgrpcv1.DroppedRange{FirstSequence: first, LastSequence: last},
	}}
}

// shownBy follows the calls for a while, and says with each item which of the blocks 1 to 9 the cache holds then.
func shownBy(t *testing.T, client *scriptedClient) (items []string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
		defer cancel()
		var cache Cache
		for item := range Follow(ctx, client, Stream{}, &cache) {
			name := fmt.Sprintf("%T", item)
			switch item := item.(type) {
			case Failed:
				continue // failures_test.go looks at these
			case Current:
				name = fmt.Sprintf("current %d+%d", item.NextSequence, item.Lag)
			case Events:
				name = fmt.Sprint("events ", item.NextSequence)
			}
			held := ""
			for hash := uint64(1); hash < 10; hash++ {
				if cache.Holds(Place{Medium: "GPU"}, BlockHash{Value: hash}) {
					held += fmt.Sprint(hash)
				}
			}
			items = append(items, name+": "+held)
		}
	})
	return items
}

var broken = status.Error(codes.Unavailable, "broken")

func TestWhatIsKnownIsShownUntilASnapshotIsComplete(t *testing.T) {
	client := &scriptedClient{calls: []answers{
		said(broken, begin("a", 1), storing(1, 0, true, 1, nil), batches(1, storedPayload(2))),
		said(refusal(codes.OutOfRange, "EVENTS_COMPACTED")),
		said(broken, begin("a", 9), storing(9, 0, false, 3, nil)),
		said(nil, begin("a", 9), storing(9, 0, false, 4, nil), storing(10, 0, false, 5, nil), storing(10, 1, true, 6, nil), batches(10, storedPayload(7))),
	}}
	equal(t, shownBy(t, client), []string{
		"kvgrpc.Reset: ", "events 1: 1", "events 2: 12",
		"kvgrpc.Reset: 12", "events 9: 12",
		"kvgrpc.Reset: 12", "events 9: 12", "kvgrpc.Reset: 12", "events 10: 12", "events 10: 56", "events 11: 567",
	})
}

func TestASnapshotThatDoesNotComeToItsOwnDigestIsNotShown(t *testing.T) {
	wrong := &kvgrpcv1.StateDigest{NextSequence: 9}
	client := &scriptedClient{calls: []answers{
		said(broken, begin("a", 1), storing(1, 0, true, 1, nil)),
		said(refusal(codes.OutOfRange, "EVENTS_COMPACTED")),
		said(nil, begin("a", 9), storing(9, 0, true, 3, wrong), batches(9, storedPayload(4))),
		said(nil, begin("a", 9), storing(9, 0, true, 5, nil)),
	}}
	equal(t, shownBy(t, client), []string{
		"kvgrpc.Reset: ", "events 1: 1", "kvgrpc.Reset: 1", "kvgrpc.Reset: 1", "events 9: 5",
	})
}

func TestWhatIsVoidIsForgottenBeforeTheNextCall(t *testing.T) {
	known := []*kvgrpcv1.WatchResponse{begin("a", 1), storing(1, 0, true, 1, nil)}
	other := &kvgrpcv1.TierDigest{Medium: "GPU", Blocks: 7}
	for name, calls := range map[string][]answers{
		"STALE_LOG": {said(broken, known...), said(refusal(codes.Aborted, "STALE_LOG"))},
		"IN_FUTURE": {said(broken, known...), said(refusal(codes.OutOfRange, "EVENTS_SEQUENCE_IN_FUTURE"))},
		"a begin":   {said(broken, known...), said(nil, begin("b", 1), batches(1, storedPayload(2)))},
		"no batch":  {said(nil, append(known, batches(1, []byte{0xc1}, storedPayload(2)))...)},
		"a digest":  {said(nil, append(known, heartbeat(1, other), batches(1, storedPayload(2)))...)},
	} {
		client := &scriptedClient{calls: append(calls, answers{silent: true}, said(nil, begin("b", 2), storing(2, 0, true, 3, nil)))}
		items := shownBy(t, client)
		equal(t, items[:min(3, len(items))], []string{"kvgrpc.Reset: ", "events 1: 1", "kvgrpc.Void: "})
		if items[len(items)-1] != "events 2: 3" {
			t.Error(name, items)
		}
	}
}

func TestASnapshotOfAnotherLogEndsWhatWasShownOfTheFirst(t *testing.T) {
	client := &scriptedClient{calls: []answers{
		said(broken, begin("a", 1), storing(1, 0, true, 1, nil)),
		said(refusal(codes.OutOfRange, "EVENTS_COMPACTED")),
		said(nil, begin("b", 2), storing(2, 0, true, 3, nil)),
	}}
	equal(t, shownBy(t, client), []string{"kvgrpc.Reset: ", "events 1: 1", "kvgrpc.Void: ", "kvgrpc.Reset: ", "events 2: 3"})
}

func TestARepeatIsPassedOverAndWhatFollowsItIsTaken(t *testing.T) {
	client := &scriptedClient{calls: []answers{said(broken,
		begin("a", 2), storing(2, 0, true, 1, nil), batches(1, storedPayload(9), storedPayload(2)), hole(0, 1), batches(3, storedPayload(3)),
	)}}
	equal(t, shownBy(t, client), []string{"kvgrpc.Reset: ", "events 2: 1", "events 3: 12", "events 4: 123"})
	if next := client.requests[1].GetFromSequence(); next != 4 {
		t.Error(next)
	}
}

func TestWhatLiesBehindAGapOrWithinASnapshotIsNotTaken(t *testing.T) {
	for _, early := range []*kvgrpcv1.WatchResponse{batches(3, storedPayload(9)), hole(3, 4)} {
		for _, first := range [][]*kvgrpcv1.WatchResponse{
			{storing(2, 0, true, 1, nil)}, {storing(2, 0, true, 1, nil), storing(3, 0, false, 8, nil)},
		} {
			messages := append(append([]*kvgrpcv1.WatchResponse{begin("a", 2)}, first...), early, batches(5, storedPayload(9)))
			client := &scriptedClient{calls: []answers{said(nil, messages...), said(nil, begin("a", 5), storing(5, 0, true, 5, nil))}}
			items := shownBy(t, client)
			wanted := []string{"kvgrpc.Reset: ", "events 2: 1", "kvgrpc.Reset: 1", "events 5: 5"}
			equal(t, append(items[:min(2, len(items)):2], items[max(0, len(items)-2):]...), wanted)
			if mode := client.requests[1].Mode; mode != kvgrpcv1.WatchMode_WATCH_MODE_SNAPSHOT {
				t.Error(mode)
			}
		}
	}
}

func TestAHeartbeatUnderLoadSaysHowMuchIsMissing(t *testing.T) {
	beat := &kvgrpcv1.WatchResponse{Kind: &kvgrpcv1.WatchResponse_Heartbeat{Heartbeat: &kvgrpcv1.WatchHeartbeat{NextSequence: 7}}}
	client := &scriptedClient{calls: []answers{said(broken, begin("a", 2), storing(2, 0, true, 1, nil), beat)}}
	equal(t, shownBy(t, client), []string{"kvgrpc.Reset: ", "events 2: 1", "current 2+5: 1"})
}

func TestWhoReadsNoSnapshotBeginsEmptyAtTheOldestBatch(t *testing.T) {
	disabled := said(refusal(codes.Unimplemented, "FEATURE_DISABLED"))
	client := &scriptedClient{calls: []answers{
		said(broken, begin("a", 2), storing(2, 0, true, 1, nil)), said(refusal(codes.OutOfRange, "EVENTS_COMPACTED")), disabled,
		said(broken, begin("a", 7), batches(7, storedPayload(7))),
	}}
	equal(t, shownBy(t, client), []string{"kvgrpc.Reset: ", "events 2: 1", "kvgrpc.Reset: 1", "events 7: ", "events 8: 7"})
}

func TestABatchThatCannotBeReadIsPassedWhereNoSnapshotMakesUpForIt(t *testing.T) {
	client := &scriptedClient{calls: []answers{
		said(refusal(codes.Unimplemented, "FEATURE_DISABLED")),
		said(broken, begin("a", 0), batches(0, storedPayload(1), []byte{0xc1}, storedPayload(3))),
	}}
	equal(t, shownBy(t, client), []string{
		"kvgrpc.Reset: ", "events 0: ", "events 1: 1", "kvgrpc.Void: ", "kvgrpc.Reset: ", "events 2: ", "events 3: 3",
	})
	if next := client.requests[2].GetFromSequence(); next != 3 {
		t.Error(client.requests[2])
	}
}

func TestWhoeverAnswersAfterAFailureMayKeepSnapshots(t *testing.T) {
	client := &scriptedClient{calls: []answers{said(refusal(codes.Unimplemented, "FEATURE_DISABLED")), said(broken), said(broken)}}
	shownBy(t, client)
	tail, again := client.requests[1].Mode, client.requests[2].Mode
	if tail != kvgrpcv1.WatchMode_WATCH_MODE_TAIL || again != kvgrpcv1.WatchMode_WATCH_MODE_SNAPSHOT {
		t.Error(tail, again)
	}
}

func TestACallThatNobodyTakesIsSilenceToo(t *testing.T) {
	client := &scriptedClient{calls: []answers{{silent: true}, said(broken)}}
	shownBy(t, client)
	if waited := client.at[1].Sub(client.at[0]); waited > idleTimeout+firstPause {
		t.Error(waited)
	}
}

func TestAFollowerThatHeardSomethingGoesOnOverARestartBehindAProxy(t *testing.T) {
	client := &scriptedClient{calls: []answers{
		said(broken, begin("a", 1), storing(1, 0, true, 1, nil)),
		said(status.Error(codes.Unknown, "502")), said(broken, begin("a", 1), batches(1, storedPayload(2))),
	}}
	equal(t, shownBy(t, client), []string{"kvgrpc.Reset: ", "events 1: 1", "events 2: 12"})
}

// A publisher whose digests are wrong for ever must not be asked for its whole state ten times a second.
func TestPausesGrowWhereEachSnapshotIsGoodAndEachHeartbeatDiffers(t *testing.T) {
	empty := &kvgrpcv1.WatchResponse{Kind: &kvgrpcv1.WatchResponse_Snapshot{Snapshot: &kvgrpcv1.SnapshotPart{
		NextSequence: 1, Last: true, State: &kvgrpcv1.StateDigest{NextSequence: 1},
	}}}
	client := &scriptedClient{}
	for range 7 {
		client.calls = append(client.calls, said(nil, begin("a", 1), empty, heartbeat(1, &kvgrpcv1.TierDigest{Medium: "GPU", Blocks: 7})))
	}
	shownBy(t, client)
	if pause := client.at[6].Sub(client.at[5]); pause < longestPause/2 || pause > longestPause {
		t.Error(pause)
	}
}

func TestAServersTimeIsWaitedWhateverTheCode(t *testing.T) {
	told, _ := status.New(codes.FailedPrecondition, "later").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(9 * time.Second)})
	client := &scriptedClient{calls: []answers{said(told.Err()), said(broken)}}
	shownBy(t, client)
	if len(client.at) < 2 || client.at[1].Sub(client.at[0]) < 9*time.Second {
		t.Error(client.at)
	}
}

func TestWhoLeavesHasTheCacheOfTheLastItem(t *testing.T) {
	client := &scriptedClient{calls: []answers{said(nil, begin("a", 1), storing(1, 0, true, 1, nil), batches(1, storedPayload(2), storedPayload(3)))}}
	var cache Cache
	for item := range Follow(context.Background(), client, Stream{}, &cache) {
		if events, isEvents := item.(Events); isEvents && events.NextSequence == 2 {
			break
		}
	}
	if blocks := cache.Blocks()[Place{Medium: "GPU"}]; blocks != 2 {
		t.Error(blocks)
	}
}
