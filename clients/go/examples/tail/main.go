// Tail prints what a rank publishes, and how its cache stands: go run . HOST:PORT. An index that follows the rank is asked
// too where one is named: go run . HOST:PORT INDEX_HOST:PORT.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	kvgrpc "kvgrpc.dev/go"
	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: tail HOST:PORT [INDEX_HOST:PORT]")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	events := kvgrpcv1.NewEventServiceClient(dial(os.Args[1]))
	var index kvgrpcv1.IndexServiceClient
	if len(os.Args) > 2 {
		index = kvgrpcv1.NewIndexServiceClient(dial(os.Args[2]))
	}
	var cache kvgrpc.Cache
	var first *kvgrpc.BlockHash
	for item := range kvgrpc.Follow(ctx, events, kvgrpc.Stream{}, &cache) {
		switch item := item.(type) {
		case kvgrpc.Failed:
			failure, _ := kvgrpc.FailureOf(item.Cause)
			fmt.Fprintln(os.Stderr, failure.Reason, item.Cause)
			if item.Lasting {
				os.Exit(1) // a router goes on, and tells a person
			}
		case kvgrpc.Void:
			fmt.Printf("nothing is known: %v\n", item.Cause)
		case kvgrpc.Reset:
			fmt.Printf("log %s: from the beginning\n", item.LogID)
		case kvgrpc.Events:
			for _, event := range item.Events {
				if stored, isStored := event.(kvgrpc.BlockStored); isStored && len(stored.Hashes) > 0 {
					first = &stored.Hashes[0]
				}
				fmt.Printf("%8d  %T\n", item.NextSequence, event)
			}
		case kvgrpc.Current:
			exact := cache.Compare(item.State) == kvgrpc.Equal
			fmt.Printf("current at %d: %v, digest equal: %v\n", item.NextSequence, cache.Blocks(), exact)
			if index != nil && first != nil {
				score(ctx, index, *first)
			}
		}
	}
}

func score(ctx context.Context, index kvgrpcv1.IndexServiceClient, hash kvgrpc.BlockHash) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	hashes := &kvgrpcv1.BlockHashes{Values: []uint64{hash.Key()}}
	prompt := &kvgrpcv1.ScorePrompt{Prefix: &kvgrpcv1.ScorePrompt_BlockHashes{BlockHashes: hashes}}
	answer, err := index.Score(ctx, &kvgrpcv1.ScoreRequest{
		Prompts:       []*kvgrpcv1.ScorePrompt{prompt},
		WithFreshness: true,
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	for _, one := range answer.Prompts[0].Scores {
		fmt.Printf("block %d: %s dp%d holds it, %s\n", hash.Key(), one.Engine, one.Dp, one.Freshness.State)
	}
}

func dial(address string) *kvgrpc.Connection {
	connection, err := kvgrpc.Dial(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return connection
}
