package kvgrpc

import (
	"errors"
	"io"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// Failure is why a call failed, by name. docs/errors.md has the table of reasons, their metadata and what to do.
type Failure struct {
	Code codes.Code
	// Reason is UNSPECIFIED where the status is not one of kvgrpc's own.
	Reason   kvgrpcv1.ErrorReason
	Metadata map[string]string
	// RetryAfter is 0 where the server named no time.
	RetryAfter time.Duration
	Message    string
}

// FailureOf reads the failure out of an error of a call. False for what is no gRPC status.
func FailureOf(err error) (Failure, bool) {
	if errors.Is(err, io.EOF) {
		return Failure{}, false
	}
	told, isStatus := status.FromError(err)
	if !isStatus || told == nil || told.Code() == codes.OK {
		return Failure{}, false
	}
	failure := Failure{Code: told.Code(), Message: told.Message()}
	for _, detail := range told.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			failure.Reason = kvgrpcv1.ErrorReason(kvgrpcv1.ErrorReason_value[detail.Reason])
			failure.Metadata = detail.Metadata
		case *errdetails.RetryInfo:
			failure.RetryAfter = detail.RetryDelay.AsDuration()
		}
	}
	return failure, true
}

// MayRepeat says whether the same call may succeed later. A server names a time for nothing else, whatever the code.
func (failure Failure) MayRepeat() bool {
	return failure.Code == codes.Unavailable || failure.RetryAfter > 0
}
