package kvgrpc

import (
	"context"
	"crypto/rand"
	"iter"

	"google.golang.org/grpc"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// Prefetch asks the hierarchical cache of a rank, and moves pages between its storage and its host. Calls are repeated while it
// is away, up to the deadline of their context. Any goroutine may use it.
type Prefetch struct {
	client kvgrpcv1.PrefetchServiceClient
}

// NewPrefetch takes a connection of Dial to the rank with pp = cp = tp = 0.
func NewPrefetch(connection grpc.ClientConnInterface) *Prefetch {
	return &Prefetch{kvgrpcv1.NewPrefetchServiceClient(connection)}
}

// Lookup says how many leading pages of a prompt are on device, host and in storage.
func (prefetch *Prefetch) Lookup(ctx context.Context, request *kvgrpcv1.LookupRequest) (*kvgrpcv1.LookupResponse, error) {
	return ask(ctx, prefetch.client.Lookup, request)
}

// StartPrefetch begins to bring pages from storage to the host. A request without an id gets one, so that a repeated call begins
// nothing twice.
func (prefetch *Prefetch) StartPrefetch(
	ctx context.Context, request *kvgrpcv1.StartPrefetchRequest,
) (*kvgrpcv1.CacheOperation, error) {
	if request.RequestId == "" {
		request.RequestId = rand.Text()
	}
	started, err := ask(ctx, prefetch.client.StartPrefetch, request)
	return started.GetOperation(), err
}

// StartBackup begins to write the leading pages that the host has to storage; otherwise as StartPrefetch.
func (prefetch *Prefetch) StartBackup(
	ctx context.Context, request *kvgrpcv1.StartBackupRequest,
) (*kvgrpcv1.CacheOperation, error) {
	if request.RequestId == "" {
		request.RequestId = rand.Text()
	}
	started, err := ask(ctx, prefetch.client.StartBackup, request)
	return started.GetOperation(), err
}

// WatchOperations tells the latest state of operations (none: of all), from the present on. It ends when those that are named have
// ended; with an error where the rank is away: watch again.
func (prefetch *Prefetch) WatchOperations(
	ctx context.Context, operationIDs ...string,
) iter.Seq2[*kvgrpcv1.WatchOperationsResponse, error] {
	request := &kvgrpcv1.WatchOperationsRequest{OperationIds: operationIDs}
	return messages(ctx, idleTimeout, func(ctx context.Context) (grpc.ServerStreamingClient[kvgrpcv1.WatchOperationsResponse], error) {
		return prefetch.client.WatchOperations(ctx, request)
	})
}

// UntilEnded watches one operation to its end, also over breaks, up to the deadline of ctx.
func (prefetch *Prefetch) UntilEnded(ctx context.Context, operationID string) (*kvgrpcv1.CacheOperation, error) {
	return ask(ctx, func(ctx context.Context, id string, _ ...grpc.CallOption) (*kvgrpcv1.CacheOperation, error) {
		var last *kvgrpcv1.CacheOperation
		for message, err := range prefetch.WatchOperations(ctx, id) {
			if err != nil {
				return nil, err
			}
			for _, operation := range message.Operations {
				last = operation
			}
		}
		return last, nil
	}, operationID)
}

// TerminatePrefetch cuts an operation short: it as it is now, and whether it is quiescent.
func (prefetch *Prefetch) TerminatePrefetch(ctx context.Context, operationID string) (*kvgrpcv1.CacheOperation, error) {
	request := &kvgrpcv1.TerminatePrefetchRequest{OperationId: operationID}
	ended, err := ask(ctx, prefetch.client.TerminatePrefetch, request)
	return ended.GetOperation(), err
}

// ListOperations gives prefetches and backups in the order in which they began; openOnly leaves out those that have ended.
func (prefetch *Prefetch) ListOperations(ctx context.Context, openOnly bool) (found []*kvgrpcv1.CacheOperation, err error) {
	request := &kvgrpcv1.ListOperationsRequest{OpenOnly: openOnly, PageSize: mostPageRows}
	err = eachPage(func(token string) (string, error) {
		request.PageToken = token
		page, err := ask(ctx, prefetch.client.ListOperations, request)
		found = append(found, page.GetOperations()...)
		return page.GetNextPageToken(), err
	})
	if err != nil {
		return nil, err
	}
	return found, nil
}

// GetCacheInfo says what the cache is made of, and how full its tiers are.
func (prefetch *Prefetch) GetCacheInfo(ctx context.Context) (*kvgrpcv1.GetCacheInfoResponse, error) {
	return ask(ctx, prefetch.client.GetCacheInfo, &kvgrpcv1.GetCacheInfoRequest{})
}

// PinPages keeps the leading pages that device and host have from eviction.
func (prefetch *Prefetch) PinPages(ctx context.Context, request *kvgrpcv1.PinPagesRequest) (*kvgrpcv1.PinPagesResponse, error) {
	return ask(ctx, prefetch.client.PinPages, request)
}

// PurgePages drops pages that nobody uses.
func (prefetch *Prefetch) PurgePages(
	ctx context.Context, request *kvgrpcv1.PurgePagesRequest,
) (*kvgrpcv1.PurgePagesResponse, error) {
	return ask(ctx, prefetch.client.PurgePages, request)
}
