package kvgrpc

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// script is a server that answers its calls one after the other: each gets the request and sends what it wants.
type script struct {
	kvgrpcv1.UnimplementedEventServiceServer
	lock     sync.Mutex
	calls    []func(call grpc.ServerStreamingServer[kvgrpcv1.WatchResponse]) error
	requests []*kvgrpcv1.WatchRequest
}

func (script *script) Watch(request *kvgrpcv1.WatchRequest, call grpc.ServerStreamingServer[kvgrpcv1.WatchResponse]) error {
	script.lock.Lock()
	script.requests = append(script.requests, request)
	if len(script.calls) == 0 {
		script.lock.Unlock()
		<-call.Context().Done()
		return nil
	}
	next := script.calls[0]
	script.calls = script.calls[1:]
	script.lock.Unlock()
	return next(call)
}

func (script *script) serve(t *testing.T) kvgrpcv1.EventServiceClient {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	kvgrpcv1.RegisterEventServiceServer(server, script)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	connection, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	return kvgrpcv1.NewEventServiceClient(connection)
}

// watched is what a Watch says until it has said so many items.
func watched(t *testing.T, client kvgrpcv1.EventServiceClient, count int) []string {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var said []string
	for item := range Watch(ctx, client, Stream{Engine: "e"}) {
		switch item := item.(type) {
		case Void:
			said = append(said, "void")
		case Reset:
			said = append(said, fmt.Sprintf("reset %s %t", item.LogID, item.Whole))
		case Events:
			said = append(said, fmt.Sprintf("events %d %d %t", item.NextSequence, len(item.Events), item.Complete))
		case Current:
			said = append(said, fmt.Sprintf("current %d", item.NextSequence))
		}
		if len(said) == count {
			return said
		}
	}
	t.Fatal("it ended:", said)
	return nil
}

func begin(log string, first uint64) *kvgrpcv1.WatchResponse {
	stream := &kvgrpcv1.EventStream{LogId: log, NextSequence: first}
	return &kvgrpcv1.WatchResponse{Kind: &kvgrpcv1.WatchResponse_Begin{
		Begin: &kvgrpcv1.WatchBegin{Stream: stream, FirstSequence: first},
	}}
}

func snapshot(next uint64, index uint32, last bool) *kvgrpcv1.WatchResponse {
	return &kvgrpcv1.WatchResponse{Kind: &kvgrpcv1.WatchResponse_Snapshot{Snapshot: &kvgrpcv1.SnapshotPart{
		NextSequence: next, Index: index, Last: last, Payloads: [][]byte{payload(1)},
	}}}
}

func batches(first uint64, payloads ...[]byte) *kvgrpcv1.WatchResponse {
	return &kvgrpcv1.WatchResponse{Kind: &kvgrpcv1.WatchResponse_Raw{
		Raw: &kvgrpcv1.RawBatches{FirstSequence: first, Payloads: payloads},
	}}
}

// [1.0, [["BlockRemoved", [hash]]], 0]
func payload(hash byte) []byte {
	start := []byte{0x93, 0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0, 0x91, 0x92, 0xac}
	return append(append(start, "BlockRemoved"...), 0x91, hash, 0)
}

func refusal(code codes.Code, reason string) error {
	told, err := status.New(code, "refused").WithDetails(&errdetails.ErrorInfo{
		Reason: "ERROR_REASON_" + reason, Domain: "kvgrpc.dev", Metadata: map[string]string{"log": "a"},
	})
	if err != nil {
		panic(err)
	}
	return told.Err()
}

func saying(end error, messages ...*kvgrpcv1.WatchResponse) func(grpc.ServerStreamingServer[kvgrpcv1.WatchResponse]) error {
	return func(call grpc.ServerStreamingServer[kvgrpcv1.WatchResponse]) error {
		for _, message := range messages {
			if err := call.Send(message); err != nil {
				return err
			}
		}
		return end
	}
}

func equal(t *testing.T, said, wanted []string) {
	if fmt.Sprint(said) != fmt.Sprint(wanted) {
		t.Errorf("said\n%v\nnot\n%v", said, wanted)
	}
}

type calls = []func(grpc.ServerStreamingServer[kvgrpcv1.WatchResponse]) error

func TestAWatchGoesOnWhereAConnectionBroke(t *testing.T) {
	server := &script{calls: calls{
		saying(status.Error(codes.Unavailable, "broken"), begin("a", 5), snapshot(5, 0, false), snapshot(5, 1, true), batches(5, payload(1), payload(2))),
		saying(nil, begin("a", 7), batches(7, payload(3))),
	}}
	said := watched(t, server.serve(t), 6)
	equal(t, said, []string{"reset a true", "events 5 1 false", "events 5 1 true", "events 6 1 true", "events 7 1 true", "events 8 1 true"})
	second := server.requests[1]
	if second.Mode != kvgrpcv1.WatchMode_WATCH_MODE_TAIL || second.LogId != "a" || second.GetFromSequence() != 7 {
		t.Error(second)
	}
}

func TestALogThatMovedOnIsReadFromASnapshot(t *testing.T) {
	for _, reason := range []string{"EVENTS_COMPACTED", "STALE_LOG", "EVENTS_SEQUENCE_IN_FUTURE"} {
		server := &script{calls: calls{
			saying(status.Error(codes.Unavailable, "broken"), begin("a", 1), snapshot(1, 0, true)),
			saying(refusal(codes.OutOfRange, reason)),
			saying(nil, begin("b", 9), snapshot(9, 0, true)),
		}}
		said := watched(t, server.serve(t), 5)
		equal(t, said, []string{"reset a true", "events 1 1 true", "void", "reset b true", "events 9 1 true"})
		if server.requests[2].Mode != kvgrpcv1.WatchMode_WATCH_MODE_SNAPSHOT {
			t.Error(server.requests[2])
		}
	}
}

func TestABatchThatCannotBeReadIsMadeUpForByASnapshot(t *testing.T) {
	server := &script{calls: calls{
		saying(nil, begin("a", 1), snapshot(1, 0, true), batches(1, []byte{0xc1})),
		saying(nil, begin("a", 2), snapshot(2, 0, true)),
	}}
	said := watched(t, server.serve(t), 5)
	equal(t, said, []string{"reset a true", "events 1 1 true", "void", "reset a true", "events 2 1 true"})
}

func TestAServerWithoutSnapshotsIsReadFromItsOldestBatch(t *testing.T) {
	server := &script{calls: calls{
		saying(refusal(codes.Unimplemented, "FEATURE_DISABLED")),
		saying(nil, begin("a", 3), batches(3, payload(1))),
	}}
	said := watched(t, server.serve(t), 3)
	equal(t, said, []string{"reset a false", "events 3 0 true", "events 4 1 true"})
}

func TestACallThatBreaksIsGoneOnWith(t *testing.T) {
	for _, code := range []codes.Code{codes.Internal, codes.Unknown, codes.Aborted, codes.DeadlineExceeded, codes.Canceled} {
		server := &script{calls: calls{
			saying(status.Error(code, "broken"), begin("a", 1), snapshot(1, 0, true), batches(1, payload(1))),
			saying(nil, begin("a", 2), batches(2, payload(1))),
		}}
		equal(t, watched(t, server.serve(t), 4)[3:], []string{"events 3 1 true"})
	}
}

func TestTheTimeThatAReaderTakesIsNotThePublishers(t *testing.T) {
	server := &script{calls: calls{func(call grpc.ServerStreamingServer[kvgrpcv1.WatchResponse]) error {
		call.Send(begin("a", 1))
		call.Send(snapshot(1, 0, false))
		select {
		case <-call.Context().Done():
			return nil
		case <-time.After(idleTimeout + time.Second):
			return call.Send(snapshot(1, 1, true))
		}
	}}}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var said []string
	for item := range Watch(ctx, server.serve(t), Stream{}) {
		if events, isEvents := item.(Events); isEvents {
			said = append(said, fmt.Sprint(events.Complete))
			if events.Complete {
				break
			}
			time.Sleep(idleTimeout + 500*time.Millisecond)
		}
	}
	equal(t, said, []string{"false", "true"})
}

func TestANewLogMayHaveSnapshotsWhereTheOneBeforeHadNone(t *testing.T) {
	server := &script{calls: calls{
		saying(refusal(codes.Unimplemented, "FEATURE_DISABLED")),
		saying(nil, begin("a", 3), batches(3, payload(1))),
		saying(refusal(codes.Aborted, "STALE_LOG")),
		saying(nil, begin("b", 9), snapshot(9, 0, true)),
	}}
	said := watched(t, server.serve(t), 6)
	equal(t, said, []string{"reset a false", "events 3 0 true", "events 4 1 true", "void", "reset b true", "events 9 1 true"})
}

func TestWhoLeavesLeavesNothingBehind(t *testing.T) {
	server := &script{}
	for range 50 {
		server.calls = append(server.calls, saying(nil, begin("a", 1), snapshot(1, 0, true)))
	}
	client := server.serve(t)
	watched(t, client, 1)
	before := runtime.NumGoroutine()
	for range 49 {
		watched(t, client, 1)
	}
	for range 100 {
		if runtime.NumGoroutine() <= before+2 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Error(before, runtime.NumGoroutine())
}
