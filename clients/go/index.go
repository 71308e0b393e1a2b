package kvgrpc

import (
	"context"

	"google.golang.org/grpc"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// Index asks an index (kvgrpc serve index) who holds the beginnings of requests. Calls are repeated while it is away, up to the
// deadline of their context. Any goroutine may use it.
type Index struct {
	client kvgrpcv1.IndexServiceClient
}

// Sources are the caches that an index follows, how many are in which state, and what it cannot follow.
type Sources struct {
	Sources     []*kvgrpcv1.IndexSource
	Counts      map[kvgrpcv1.IndexSourceState]uint32
	NotFollowed []string
}

// NewIndex takes a connection of Dial.
func NewIndex(connection grpc.ClientConnInterface) *Index {
	return &Index{kvgrpcv1.NewIndexServiceClient(connection)}
}

// Score says of each prompt how many of its leading blocks each cache holds.
func (index *Index) Score(ctx context.Context, request *kvgrpcv1.ScoreRequest) (*kvgrpcv1.ScoreResponse, error) {
	return ask(ctx, index.client.Score, request)
}

// Plan says of each request where to run it, and from whom to pull which part of its prompt. With Reserve a repeated call may count
// a request twice, for the second until its engine tells what it has to do.
func (index *Index) Plan(ctx context.Context, request *kvgrpcv1.PlanRequest) (*kvgrpcv1.PlanResponse, error) {
	return ask(ctx, index.client.Plan, request)
}

// ListSources gives the caches that are followed, in these states (none: in all).
func (index *Index) ListSources(ctx context.Context, states ...kvgrpcv1.IndexSourceState) (Sources, error) {
	request := &kvgrpcv1.ListSourcesRequest{States: states, PageSize: mostPageRows}
	found := Sources{Counts: map[kvgrpcv1.IndexSourceState]uint32{}}
	err := eachPage(func(token string) (string, error) {
		request.PageToken = token
		page, err := ask(ctx, index.client.ListSources, request)
		found.Sources = append(found.Sources, page.GetSources()...)
		found.NotFollowed = page.GetNotFollowed()
		for _, count := range page.GetCounts() {
			found.Counts[count.State] = count.Sources
		}
		return page.GetNextPageToken(), err
	})
	if err != nil {
		return Sources{}, err
	}
	return found, nil
}
