package kvgrpc

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// namedIndex answers each question with its name, and none that has no prompt.
type namedIndex struct {
	kvgrpcv1.UnimplementedIndexServiceServer
	name string
}

func (index namedIndex) Score(_ context.Context, request *kvgrpcv1.ScoreRequest) (*kvgrpcv1.ScoreResponse, error) {
	if len(request.Prompts) == 0 {
		return nil, status.Error(codes.InvalidArgument, "no prompt")
	}
	score := &kvgrpcv1.CacheScore{Engine: index.name}
	return &kvgrpcv1.ScoreResponse{Prompts: []*kvgrpcv1.PromptScores{{Scores: []*kvgrpcv1.CacheScore{score}}}}, nil
}

func listenHere(t *testing.T) net.Listener {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return listener
}

func serveIndex(t *testing.T, name string) (address string, stop func()) {
	listener, server := listenHere(t), grpc.NewServer()
	kvgrpcv1.RegisterIndexServiceServer(server, namedIndex{name: name})
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return listener.Addr().String(), server.Stop
}

func dialHere(t *testing.T, address string) *Connection {
	connection, err := Dial(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	return connection
}

func answeredBy(t *testing.T, indexes *Indexes) string {
	answer, err := indexes.Score(t.Context(), &kvgrpcv1.ScoreRequest{Prompts: []*kvgrpcv1.ScorePrompt{{}}})
	if err != nil {
		t.Fatal(err)
	}
	return answer.Prompts[0].Scores[0].Engine
}

func TestTheNextIndexAnswersWhereOneRefuses(t *testing.T) {
	first, stop := serveIndex(t, "first")
	second, _ := serveIndex(t, "second")
	indexes := NewIndexes(10*time.Second, dialHere(t, first), dialHere(t, second))
	if by := answeredBy(t, indexes); by != "first" {
		t.Fatal(by)
	}
	stop()
	if by := answeredBy(t, indexes); by != "second" || indexes.Unanswered() != 0 {
		t.Fatal(by, indexes.Unanswered())
	}
	if _, err := indexes.Score(t.Context(), &kvgrpcv1.ScoreRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Fatal("what no index would answer is told:", err)
	}
}

func TestOneThatHangsCostsOneQuestionAndIsAskedLast(t *testing.T) {
	hanging := listenHere(t) // takes connections, and says nothing
	defer hanging.Close()
	well, _ := serveIndex(t, "well")
	indexes := NewIndexes(time.Second, dialHere(t, hanging.Addr().String()), dialHere(t, well))
	request := &kvgrpcv1.ScoreRequest{Prompts: []*kvgrpcv1.ScorePrompt{{}}}
	began := time.Now()
	if _, err := indexes.Score(t.Context(), request); !errors.Is(err, ErrUnanswered) || time.Since(began) < 900*time.Millisecond {
		t.Fatal(err, time.Since(began))
	}
	for range 3 {
		if by := answeredBy(t, indexes); by != "well" {
			t.Fatal(by)
		}
	}
	if indexes.Unanswered() != 1 {
		t.Fatal(indexes.Unanswered())
	}
}

func TestWhoeverWentIsToldSoAndNoIndexIsToBlame(t *testing.T) {
	address, _ := serveIndex(t, "first")
	indexes := NewIndexes(10*time.Second, dialHere(t, address))
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := indexes.Score(gone, &kvgrpcv1.ScoreRequest{}); !errors.Is(err, context.Canceled) || indexes.Unanswered() != 0 {
		t.Fatal(err, indexes.Unanswered())
	}
}
