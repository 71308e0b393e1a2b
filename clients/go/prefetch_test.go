package kvgrpc

import (
	"context"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// A real rank, whose storage has six pages of the tokens 0 to 23: tests/integration/test_prefetch_clients.py opens it.
func TestTheCacheOfARankIsDrivenAndWatched(t *testing.T) {
	address := os.Getenv("KVGRPC_TEST_CACHE")
	if address == "" {
		t.Skip("KVGRPC_TEST_CACHE names no rank with a cache")
	}
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	cache := kvgrpcv1.NewPrefetchServiceClient(connection)
	pages := &kvgrpcv1.PromptPages{}
	for token := range uint64(24) {
		pages.Tokens = append(pages.Tokens, token)
	}

	found, err := cache.Lookup(ctx, &kvgrpcv1.LookupRequest{Pages: pages})
	if err != nil || found.HostPages != 0 || found.StoragePages != 6 {
		t.Fatal(found, err)
	}
	prefetch, err := cache.StartPrefetch(ctx, &kvgrpcv1.StartPrefetchRequest{Pages: pages, RequestId: "go"})
	if err != nil {
		t.Fatal(err)
	}
	end := watchToItsEnd(t, ctx, cache, prefetch.Operation)
	if end.State != kvgrpcv1.OperationState_OPERATION_STATE_DONE || end.CompletedPages != 6 {
		t.Fatal(end)
	}
	backup, err := cache.StartBackup(ctx, &kvgrpcv1.StartBackupRequest{Pages: pages})
	if err != nil {
		t.Fatal(err)
	}
	if end = watchToItsEnd(t, ctx, cache, backup.Operation); end.CompletedPages != 6 {
		t.Fatal(end)
	}
	info, err := cache.GetCacheInfo(ctx, &kvgrpcv1.GetCacheInfoRequest{})
	if err != nil || info.StorageBackend != "file" || info.Tiers[0].UsedPages != 6 {
		t.Fatal(info, err)
	}

	wrong := &kvgrpcv1.PromptPages{PageHashes: [][]byte{make([]byte, 32), make([]byte, 31)}}
	_, err = cache.StartPrefetch(ctx, &kvgrpcv1.StartPrefetchRequest{Pages: wrong})
	failure, typed := FailureOf(err)
	if !typed || failure.Reason != kvgrpcv1.ErrorReason_ERROR_REASON_INVALID_REQUEST {
		t.Fatal(err)
	}
	if failure.Metadata["field"] != "pages.page_hashes[1]" || failure.MayRepeat() {
		t.Fatal(failure)
	}
}

// watchToItsEnd is the last state of an operation: a watch of named ones ends with them.
func watchToItsEnd(
	t *testing.T, ctx context.Context, cache kvgrpcv1.PrefetchServiceClient, operation *kvgrpcv1.CacheOperation,
) *kvgrpcv1.CacheOperation {
	request := &kvgrpcv1.WatchOperationsRequest{OperationIds: []string{operation.OperationId}}
	watch, err := cache.WatchOperations(ctx, request)
	for err == nil {
		var message *kvgrpcv1.WatchOperationsResponse
		if message, err = watch.Recv(); err == nil && len(message.Operations) > 0 {
			operation = message.Operations[len(message.Operations)-1]
		}
	}
	if !errors.Is(err, io.EOF) || !operation.Quiescent {
		t.Fatal(operation, err)
	}
	return operation
}
