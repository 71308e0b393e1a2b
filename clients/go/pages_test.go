package kvgrpc

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// endlessServer has two pages of everything, of which each names the other.
type endlessServer struct {
	kvgrpcv1.UnimplementedRegistryServiceServer
	kvgrpcv1.UnimplementedIndexServiceServer
	kvgrpcv1.UnimplementedPrefetchServiceServer
	kvgrpcv1.UnimplementedEventServiceServer
}

func otherPage(token string) string {
	if token == "one" {
		return "other"
	}
	return "one"
}

func (endlessServer) GetEngine(_ context.Context, request *kvgrpcv1.GetEngineRequest) (*kvgrpcv1.GetEngineResponse, error) {
	engine := &kvgrpcv1.Engine{Name: request.Engine}
	return &kvgrpcv1.GetEngineResponse{Engine: engine, NextPageToken: otherPage(request.PageToken)}, nil
}

func (endlessServer) ListEngines(_ context.Context, request *kvgrpcv1.ListEnginesRequest) (*kvgrpcv1.ListEnginesResponse, error) {
	return &kvgrpcv1.ListEnginesResponse{NextPageToken: otherPage(request.PageToken)}, nil
}

func (endlessServer) ListSources(_ context.Context, request *kvgrpcv1.ListSourcesRequest) (*kvgrpcv1.ListSourcesResponse, error) {
	return &kvgrpcv1.ListSourcesResponse{NextPageToken: otherPage(request.PageToken)}, nil
}

func (endlessServer) ListOperations(
	_ context.Context, request *kvgrpcv1.ListOperationsRequest,
) (*kvgrpcv1.ListOperationsResponse, error) {
	return &kvgrpcv1.ListOperationsResponse{NextPageToken: otherPage(request.PageToken)}, nil
}

func (endlessServer) ListStreams(_ context.Context, request *kvgrpcv1.ListStreamsRequest) (*kvgrpcv1.ListStreamsResponse, error) {
	return &kvgrpcv1.ListStreamsResponse{NextPageToken: otherPage(request.PageToken)}, nil
}

// A server that names the same page again is told so by name, and not read until memory is full.
func TestAListWithoutAnEndIsNotReadForEver(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	kvgrpcv1.RegisterRegistryServiceServer(server, endlessServer{})
	kvgrpcv1.RegisterIndexServiceServer(server, endlessServer{})
	kvgrpcv1.RegisterPrefetchServiceServer(server, endlessServer{})
	kvgrpcv1.RegisterEventServiceServer(server, endlessServer{})
	go server.Serve(listener)
	defer server.Stop()
	dial := func(address string) (*Connection, error) {
		return Dial(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	}
	address := listener.Addr().String()
	connection, err := dial(address)
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	registry := NewRegistry(connection)
	index := &PrefixIndex{options: IndexOptions{Dial: dial}}
	for what, list := range map[string]func() error{
		"GetEngine":      func() error { _, err := registry.GetEngine(ctx, "e"); return err },
		"ListEngines":    func() error { _, err := registry.ListEngines(ctx, 0, true); return err },
		"ListSources":    func() error { _, err := NewIndex(connection).ListSources(ctx); return err },
		"ListOperations": func() error { _, err := NewPrefetch(connection).ListOperations(ctx, false); return err },
		"ListStreams":    func() error { _, err := index.streamsOf(ctx, address); return err },
	} {
		failure, isTyped := FailureOf(list())
		isInternal := failure.Code == codes.Internal && failure.Reason == kvgrpcv1.ErrorReason_ERROR_REASON_INTERNAL
		if !isTyped || !isInternal || failure.MayRepeat() || !strings.Contains(failure.Message, "its list has no end") {
			t.Error(what, failure)
		}
	}
}
