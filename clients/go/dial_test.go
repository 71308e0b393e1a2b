package kvgrpc

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// A publisher of an empty cache.
type emptyPublisher struct {
	kvgrpcv1.UnimplementedEventServiceServer
}

func (emptyPublisher) Watch(_ *kvgrpcv1.WatchRequest, stream grpc.ServerStreamingServer[kvgrpcv1.WatchResponse]) error {
	state := &kvgrpcv1.StateDigest{}
	end := &kvgrpcv1.SnapshotPart{Last: true, State: state}
	for _, said := range []*kvgrpcv1.WatchResponse{begin("a", 0), {Kind: &kvgrpcv1.WatchResponse_Snapshot{Snapshot: end}}} {
		if err := stream.Send(said); err != nil {
			return err
		}
	}
	for stream.Context().Err() == nil {
		if err := stream.Send(heartbeat(0)); err != nil {
			return err
		}
		select {
		case <-stream.Context().Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	return nil
}

func serve(t *testing.T, address string) (*grpc.Server, string) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	kvgrpcv1.RegisterEventServiceServer(server, emptyPublisher{})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return server, listener.Addr().String()
}

// follow says on the channel whenever the follower is current, until the test ends.
func follow(t *testing.T, address string) <-chan time.Time {
	connection, err := Dial(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	current, ended := make(chan time.Time), make(chan struct{})
	t.Cleanup(func() {
		cancel()
		<-ended
		_ = connection.Close()
	})
	go func() {
		defer close(ended)
		var cache Cache
		for item := range Follow(ctx, kvgrpcv1.NewEventServiceClient(connection), Stream{}, &cache) {
			if _, isCurrent := item.(Current); isCurrent {
				select {
				case current <- time.Now():
				case <-ctx.Done():
				}
			}
		}
	}()
	return current
}

func within(t *testing.T, current <-chan time.Time, limit time.Duration, what string) {
	select {
	case <-current:
	case <-time.After(limit):
		t.Fatalf("%s: not within %s", what, limit)
	}
}

// A proxy whose connections can be frozen: they stay open, and carry nothing any more. Later ones are carried.
type proxy struct {
	listener net.Listener
	freeze   atomic.Pointer[chan struct{}]
}

func newProxy(t *testing.T, to string) *proxy {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	made := &proxy{listener: listener}
	thaw := make(chan struct{})
	made.freeze.Store(&thaw)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			onward, err := net.Dial("tcp", to)
			if err != nil {
				_ = from.Close()
				continue
			}
			frozen := *made.freeze.Load()
			go carry(from, onward, frozen)
			go carry(onward, from, frozen)
		}
	}()
	return made
}

func (made *proxy) freezeAll() {
	fresh := make(chan struct{})
	close(*made.freeze.Swap(&fresh))
}

func carry(from, to net.Conn, frozen <-chan struct{}) {
	buffer := make([]byte, 1<<16)
	for {
		count, err := from.Read(buffer)
		select {
		case <-frozen:
			// Its peer sees an open connection, until it closes it itself.
			_, _ = io.Copy(io.Discard, from)
			return
		default:
		}
		if err == nil {
			_, err = to.Write(buffer[:count])
		}
		if err != nil {
			_ = from.Close()
			_ = to.Close()
			return
		}
	}
}

func TestAFrozenPublisherIsLeftForWhoAnswersAtItsAddress(t *testing.T) {
	t.Parallel()
	_, address := serve(t, "127.0.0.1:0")
	proxy := newProxy(t, address)
	current := follow(t, proxy.listener.Addr().String())
	within(t, current, 5*time.Second, "the first connection")
	proxy.freezeAll()
	// What was said before may still come.
	for quiet := false; !quiet; {
		select {
		case <-current:
		case <-time.After(time.Second):
			quiet = true
		}
	}
	within(t, current, idleTimeout+time.Second, "the next connection")
}

func TestAfterAnOutageOf45SecondsItIsBackWithinTwo(t *testing.T) {
	t.Parallel()
	server, address := serve(t, "127.0.0.1:0")
	current := follow(t, address)
	within(t, current, 5*time.Second, "the first connection")
	server.Stop()
	// An outage, in which gRPC's own pauses would have grown to half a minute.
	time.Sleep(45 * time.Second)
	began := time.Now()
	serve(t, address)
	for late := range current {
		if late.After(began) {
			t.Logf("back after %s", late.Sub(began))
			break
		}
	}
	if back := time.Since(began); back > 2*time.Second {
		t.Errorf("back after %s", back)
	}
}

func TestAClosedConnectionMakesNoCall(t *testing.T) {
	connection, err := Dial("127.0.0.1:1", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	if connection.Close() != nil || connection.Close() != nil {
		t.Error("closing twice is nothing")
	}
	client := kvgrpcv1.NewEventServiceClient(connection)
	if _, err := client.ListStreams(t.Context(), &kvgrpcv1.ListStreamsRequest{}); err != errClosed {
		t.Error(err)
	}
	if _, err := client.Watch(t.Context(), &kvgrpcv1.WatchRequest{}); err != errClosed {
		t.Error(err)
	}
}
