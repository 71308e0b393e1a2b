package kvgrpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// A row of the table of docs/followers.md, which every follower is tested with.
type failureRow struct {
	Statuses     []string `json:"statuses"`
	RetrySeconds *int64   `json:"retry_seconds"`
	WaitsSeconds int64    `json:"waits_seconds"`
	Cursor       string   `json:"cursor"`
	First        string   `json:"first"`
}

func (row failureRow) refusal(t *testing.T, name string) error {
	words := append(strings.Fields(name), "", "")
	var code codes.Code
	if err := code.UnmarshalJSON([]byte(`"` + words[0] + `"`)); err != nil {
		t.Fatal(err)
	}
	told := status.New(code, "refused")
	if words[1] != "" {
		told, _ = told.WithDetails(&errdetails.ErrorInfo{
			Reason: "ERROR_REASON_" + words[1], Domain: domain, Metadata: map[string]string{"field": words[2]},
		})
	}
	if row.RetrySeconds != nil {
		told, _ = told.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Duration(*row.RetrySeconds) * time.Second)})
	}
	return told.Err()
}

// does is what a follower does about the last of some calls, in the words of the table.
func (row failureRow) does(t *testing.T, calls ...answers) string {
	var words []string
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		client := &scriptedClient{calls: append(slices.Clone(calls), said(nil))}
		var cache Cache
		isLasting := false
		for item := range Follow(ctx, client, Stream{}, &cache) {
			if failed, isFailed := item.(Failed); isFailed && len(client.at) == len(calls) {
				isLasting = failed.Lasting
			}
			if len(client.at) > len(calls) {
				break
			}
		}
		words = append(words, "forget")
		if cache.Holds(Place{Medium: "GPU"}, BlockHash{Value: 1}) {
			words[0] = "keep"
		}
		pause := client.at[len(calls)].Sub(client.at[len(calls)-1])
		mode := strings.TrimPrefix(client.requests[len(calls)].Mode.String(), "WATCH_MODE_")
		least := time.Duration(row.WaitsSeconds) * time.Second
		switch {
		case pause == 0:
			words = append(words, "at once "+mode)
		case pause < least+firstPause/2 || pause > least+longestPause:
			t.Error(calls, "paused for", pause)
		default:
			words = append(words, "pause", mode)
		}
		if isLasting {
			words = append(words, "lasting")
		}
	})
	return strings.Join(words, ", ")
}

func TestAFollowerDoesWhatTheTableSays(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(golden, "failures.json"))
	if err != nil {
		t.Fatal(err)
	}
	var rows []failureRow
	if err := json.Unmarshal(text, &rows); err != nil || len(rows) < 9 {
		t.Fatal(len(rows), err)
	}
	known := said(broken, begin("a", 1), storing(1, 0, true, 1, nil))
	for _, row := range rows {
		for _, name := range row.Statuses {
			refused := said(row.refusal(t, name))
			if does := row.does(t, known, refused); does != row.Cursor {
				t.Errorf("%s from the cursor: %s, not %s", name, does, row.Cursor)
			}
			if _, does, _ := strings.Cut(row.does(t, refused), ", "); does != row.First {
				t.Errorf("%s first: %s, not %s", name, does, row.First)
			}
		}
	}
}

func TestAFailureIsToldWithItsReason(t *testing.T) {
	server := &script{calls: calls{saying(refusal(codes.NotFound, "STREAM_NOT_FOUND"))}}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for item := range Watch(ctx, server.serve(t), Stream{}) {
		failed, isFailed := item.(Failed)
		failure, isFailure := FailureOf(failed.Cause)
		if !isFailed || !isFailure || failure.Reason != kvgrpcv1.ErrorReason_ERROR_REASON_STREAM_NOT_FOUND || failure.Metadata["log"] != "a" {
			t.Error(item)
		}
		break
	}
	if _, isFailure := FailureOf(errors.New("no status")); isFailure {
		t.Error("an error of another kind is no failure of a call")
	}
}

func TestAReasonOfAnotherDomainIsNotOurs(t *testing.T) {
	told, _ := status.New(codes.NotFound, "theirs").WithDetails(&errdetails.ErrorInfo{Reason: "ERROR_REASON_STALE_LOG", Domain: "example.com"})
	if failure, _ := FailureOf(told.Err()); failure.Reason != kvgrpcv1.ErrorReason_ERROR_REASON_UNSPECIFIED || failure.Metadata != nil {
		t.Error(failure)
	}
}

func TestSilenceIsToldByItsName(t *testing.T) {
	var causes []string
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		for item := range Watch(ctx, &scriptedClient{calls: []answers{{silent: true}}}, Stream{}) {
			causes = append(causes, fmt.Sprint(item.(Failed).Cause))
		}
	})
	if len(causes) == 0 || causes[0] != "nothing came for 5s" {
		t.Error(causes)
	}
}
