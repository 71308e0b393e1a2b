package kvgrpc

import (
	"context"
	"errors"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"
)

const (
	// gRPC's own pauses between attempts grow to two minutes: a publisher would be back for so long before anybody asks it.
	firstDialPause, longestDialPause = 100 * time.Millisecond, time.Second
	longestAttempt                   = 5 * time.Second
	// Servers send away who pings more often than each 10 s.
	pingInterval, pingTimeout = 30 * time.Second, 10 * time.Second
)

var errClosed = errors.New("the connection was closed")

// Dial gives a connection for every client of this module's services: it is tried again within a second where nobody answers,
// pinged while it is idle, and left for a new one where a Watch heard nothing for 5 s (a frozen process holds its connections open).
// options come behind its own: credentials are among them, as in grpc.NewClient.
func Dial(address string, options ...grpc.DialOption) (*Connection, error) {
	own := []grpc.DialOption{
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: firstDialPause, Multiplier: 1.6, Jitter: 0.2, MaxDelay: longestDialPause,
			},
			MinConnectTimeout: longestAttempt,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingInterval, Timeout: pingTimeout}),
	}
	connection := &Connection{dial: func() (*grpc.ClientConn, error) {
		return grpc.NewClient(address, append(own, options...)...)
	}}
	current, err := connection.dial()
	connection.current = current
	return connection, err
}

// Connection is what Dial gives; a grpc.ClientConnInterface. Any goroutine may use it.
type Connection struct {
	dial    func() (*grpc.ClientConn, error)
	mutex   sync.Mutex
	current *grpc.ClientConn
	closed  bool
}

// Invoke makes a unary call. Generated clients call it.
func (connection *Connection) Invoke(ctx context.Context, method string, args, reply any, options ...grpc.CallOption) error {
	current, err := connection.use()
	if err != nil {
		return err
	}
	return current.Invoke(ctx, method, args, reply, options...)
}

// NewStream begins a stream. Generated clients call it.
func (connection *Connection) NewStream(
	ctx context.Context, desc *grpc.StreamDesc, method string, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	current, err := connection.use()
	if err != nil {
		return nil, err
	}
	stream, err := current.NewStream(ctx, desc, method, options...)
	if err != nil {
		connection.leaveIfSilent(ctx, current)
		return nil, err
	}
	return &heardStream{stream, ctx, connection, current}, nil
}

// Close ends the connection and every call on it.
func (connection *Connection) Close() error {
	connection.mutex.Lock()
	defer connection.mutex.Unlock()
	if connection.closed {
		return nil
	}
	connection.closed = true
	return connection.current.Close()
}

func (connection *Connection) use() (*grpc.ClientConn, error) {
	connection.mutex.Lock()
	defer connection.mutex.Unlock()
	if connection.closed {
		return nil, errClosed
	}
	return connection.current, nil
}

// connect begins to connect, where nothing has; it waits for nothing.
func (connection *Connection) connect() {
	if current, err := connection.use(); err == nil {
		current.Connect()
	}
}

// leaveIfSilent takes a new connection where a Watch gave this one up.
func (connection *Connection) leaveIfSilent(ctx context.Context, silent *grpc.ClientConn) {
	if context.Cause(ctx) != errSilent {
		return
	}
	connection.mutex.Lock()
	defer connection.mutex.Unlock()
	if connection.closed || connection.current != silent {
		return
	}
	fresh, err := connection.dial()
	if err != nil {
		return
	}
	connection.current = fresh
	_ = silent.Close()
}

// heardStream knows the connection that it runs over.
type heardStream struct {
	grpc.ClientStream
	ctx        context.Context
	connection *Connection
	over       *grpc.ClientConn
}

func (stream *heardStream) RecvMsg(message any) error {
	err := stream.ClientStream.RecvMsg(message)
	if err != nil {
		stream.connection.leaveIfSilent(stream.ctx, stream.over)
	}
	return err
}
