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

const domain = "kvgrpc.dev"

// Failure is why a call failed, by name. docs/errors.md has the table of reasons, their metadata and what to do.
type Failure struct {
	Code codes.Code
	// Reason is UNSPECIFIED where the status is not one of kvgrpc's own.
	Reason   kvgrpcv1.ErrorReason
	Metadata map[string]string
	// RetryAfter is 0 where the server named no time, or none to wait.
	RetryAfter time.Duration
	Message    string
	mayRepeat  bool
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
			if detail.Domain != domain {
				continue
			}
			failure.Reason = kvgrpcv1.ErrorReason(kvgrpcv1.ErrorReason_value[detail.Reason])
			failure.Metadata = detail.Metadata
		case *errdetails.RetryInfo:
			failure.RetryAfter, failure.mayRepeat = max(0, detail.RetryDelay.AsDuration()), true
		}
	}
	return failure, true
}

// MayRepeat says whether the same call may succeed later. A server names a time for nothing else, whatever the code.
func (failure Failure) MayRepeat() bool {
	return failure.Code == codes.Unavailable || failure.mayRepeat
}

// isLasting says whether time alone can hardly mend it. Somebody answered here once, where begun is true: before, what libraries
// call a stream that a proxy reset is whatever answers there.
func (failure Failure) isLasting(begun bool) bool {
	switch failure.Code {
	case codes.Canceled, codes.Aborted, codes.DeadlineExceeded:
		return false
	case codes.Internal, codes.Unknown:
		return !begun && !failure.MayRepeat()
	}
	return !failure.MayRepeat()
}

// keepsNone says whether a server refused a snapshot because it keeps none, or is older than snapshots.
func (failure Failure) keepsNone() bool {
	switch failure.Reason {
	case kvgrpcv1.ErrorReason_ERROR_REASON_FEATURE_DISABLED:
		return true
	case kvgrpcv1.ErrorReason_ERROR_REASON_INVALID_REQUEST:
		return failure.Metadata["field"] == "mode"
	}
	return false
}
