package kvgrpc

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// A call whose context has no deadline gets this one: a host that vanished closes nothing.
	usualTimeout                    = 10 * time.Second
	firstRepeatPause, longestRepeat = 50 * time.Millisecond, 2 * time.Second
	mostPageRows                    = 1000
)

// ask makes an idempotent call, again while the server is away or asks for time, up to the deadline of ctx (10 s where it has
// none). The error is the last one.
func ask[Request, Response any](
	ctx context.Context, method func(context.Context, Request, ...grpc.CallOption) (Response, error), request Request,
) (Response, error) {
	deadline, hasDeadline := ctx.Deadline()
	if !hasDeadline {
		var cancel context.CancelFunc
		deadline = time.Now().Add(usualTimeout)
		ctx, cancel = context.WithDeadline(ctx, deadline)
		defer cancel()
	}
	longest := firstRepeatPause
	for {
		response, err := method(ctx, request)
		failure, _ := FailureOf(err)
		// An attempt that has a shorter time of its own is not the last.
		if err == nil || !failure.MayRepeat() && failure.Code != codes.DeadlineExceeded {
			return response, err
		}
		pause := max(rand.N(longest), failure.RetryAfter)
		if !time.Now().Add(pause).Before(deadline) {
			return response, err
		}
		longest = min(2*longest, longestRepeat)
		select {
		case <-ctx.Done():
			return response, err
		case <-time.After(pause):
		}
	}
}

// silent names what we ended ourselves: its status is that of a call that took too long.
func silent(ctx context.Context, err error) error {
	if context.Cause(ctx) == errSilent {
		return status.Error(codes.DeadlineExceeded, errSilent.Error())
	}
	return err
}

func endedWell(err error) bool { return errors.Is(err, io.EOF) }
