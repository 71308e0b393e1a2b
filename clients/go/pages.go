package kvgrpc

import (
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// eachPage asks for one page of a list after the other, the first by no token. What names a page that it named before has a list
// without an end, and is told so.
func eachPage(ask func(token string) (next string, err error)) error {
	named := map[string]bool{}
	for token := ""; ; {
		next, err := ask(token)
		if err != nil || next == "" {
			return err
		}
		if named[next] {
			return endless()
		}
		named[next], token = true, next
	}
}

func endless() error {
	told := status.New(codes.Internal, "the server names a page that it named before: its list has no end")
	info := &errdetails.ErrorInfo{Reason: kvgrpcv1.ErrorReason_ERROR_REASON_INTERNAL.String(), Domain: domain}
	if detailed, err := told.WithDetails(info); err == nil {
		told = detailed
	}
	return told.Err()
}
