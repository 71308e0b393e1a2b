package kvgrpc

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// ErrUnanswered: no index answered in time. Route without a score; the next question goes elsewhere.
var ErrUnanswered = errors.New("no index answered in time")

// Indexes asks several indexes of one fleet, and waits for none: a question goes to the one that failed longest ago, and where that
// refuses at once to the next. After its time there is no answer, and the next question goes elsewhere. Any goroutine may use it.
type Indexes struct {
	within     time.Duration
	mutex      sync.Mutex
	indexes    []*oneOfIndexes
	unanswered uint64
}

type oneOfIndexes struct {
	client     kvgrpcv1.IndexServiceClient
	connection *Connection
	// When it last did not answer.
	failedAt time.Time
}

// NewIndexes takes a connection of Dial to each, and how long a router waits: it stands in the path of every request, so 20 ms.
func NewIndexes(within time.Duration, connections ...*Connection) *Indexes {
	indexes := &Indexes{within: within}
	for _, connection := range connections {
		client := kvgrpcv1.NewIndexServiceClient(connection)
		indexes.indexes = append(indexes.indexes, &oneOfIndexes{client: client, connection: connection})
	}
	return indexes
}

// Score says who holds the beginnings of requests. ErrUnanswered where nobody answers in time; other errors are what no other index
// would answer either.
func (indexes *Indexes) Score(ctx context.Context, request *kvgrpcv1.ScoreRequest) (*kvgrpcv1.ScoreResponse, error) {
	return firstAnswer(ctx, indexes, kvgrpcv1.IndexServiceClient.Score, request)
}

// Plan says where to run requests, and from whom to pull which part of their prompts; errors as of Score.
func (indexes *Indexes) Plan(ctx context.Context, request *kvgrpcv1.PlanRequest) (*kvgrpcv1.PlanResponse, error) {
	return firstAnswer(ctx, indexes, kvgrpcv1.IndexServiceClient.Plan, request)
}

// Unanswered counts the questions that nobody answered in time.
func (indexes *Indexes) Unanswered() uint64 {
	indexes.mutex.Lock()
	defer indexes.mutex.Unlock()
	return indexes.unanswered
}

func firstAnswer[Request, Response any](
	ctx context.Context, indexes *Indexes,
	method func(kvgrpcv1.IndexServiceClient, context.Context, Request, ...grpc.CallOption) (Response, error), request Request,
) (none Response, err error) {
	within, cancel := context.WithTimeout(ctx, indexes.within)
	defer cancel()
	for _, index := range indexes.inTurn() {
		if within.Err() != nil {
			break
		}
		response, err := method(index.client, within, request)
		if err == nil {
			return response, nil
		}
		failure, _ := FailureOf(err)
		if ctx.Err() != nil || !failure.MayRepeat() && failure.Code != codes.DeadlineExceeded {
			return none, err
		}
		indexes.failed(index)
	}
	if ctx.Err() != nil { // its caller went, and no index is to blame
		return none, ctx.Err()
	}
	indexes.mutex.Lock()
	defer indexes.mutex.Unlock()
	indexes.unanswered++
	return none, ErrUnanswered
}

// inTurn gives the one that failed longest ago first, and has the others connect: nobody has time for that when the first one dies.
func (indexes *Indexes) inTurn() []*oneOfIndexes {
	indexes.mutex.Lock()
	inTurn := slices.Clone(indexes.indexes)
	slices.SortStableFunc(inTurn, func(one, other *oneOfIndexes) int { return one.failedAt.Compare(other.failedAt) })
	indexes.mutex.Unlock()
	for _, other := range inTurn[min(1, len(inTurn)):] {
		other.connection.connect()
	}
	return inTurn
}

func (indexes *Indexes) failed(index *oneOfIndexes) {
	indexes.mutex.Lock()
	defer indexes.mutex.Unlock()
	index.failedAt = time.Now()
}
