// Router is examples/router/router.py in Go: it asks the index where to run each request, has pages pulled, and hands it on.
//
//	go run . -registry HOST:PORT -index HOST:PORT < requests.jsonl    # a line each: {"tokens": [1, 2, ...]}
//
// What is yours to add: how a request reaches an engine, and how its answer comes back.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	kvgrpc "kvgrpc.dev/go"
	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

const (
	longestLine = 16 << 20
	atOnce      = 32
	callTime    = 10 * time.Second
	// For so long a request may be held back; what has come by then is used, the rest is computed.
	pullTime = 5 * time.Second
)

// router: registry says where engines are, index what they hold and how busy they are.
type router struct {
	registry *kvgrpc.Registry
	index    *kvgrpc.Index
	model    string

	lock   sync.Mutex
	caches map[string]*kvgrpc.Prefetch
}

type decided struct {
	Engine     *string `json:"engine"`
	PulledFrom *string `json:"pulled_from"`
	Blocks     uint32  `json:"blocks"`
	Why        string  `json:"why,omitempty"`
}

// plan says where to run it and what to pull first; nil where no engine is followed.
func (router *router) plan(ctx context.Context, tokens []uint64) (*kvgrpcv1.Placement, error) {
	ids := make([]uint32, len(tokens))
	for n, token := range tokens {
		ids[n] = uint32(token)
	}
	prefix := &kvgrpcv1.ScorePrompt{Model: router.model}
	prefix.Prefix = &kvgrpcv1.ScorePrompt_Sglang{Sglang: &kvgrpcv1.SglangPrompt{TokenIds: ids}}
	prompt := &kvgrpcv1.PlanPrompt{Prompt: prefix, Tokens: uint32(len(tokens))}
	// We do as it says.
	answer, err := router.index.Plan(ctx, &kvgrpcv1.PlanRequest{Prompts: []*kvgrpcv1.PlanPrompt{prompt}, Reserve: true})
	if err != nil || len(answer.Plans[0].Placements) == 0 {
		return nil, err
	}
	return answer.Plans[0].Placements[0], nil
}

// pull gives the pages that lie at the engine once its pull has ended, however that was: nothing here fails the request.
func (router *router) pull(ctx context.Context, tokens []uint64, at *kvgrpcv1.Placement) uint32 {
	cache, err := router.cache(ctx, at.Engine, at.Dp)
	if err == nil {
		var operation *kvgrpcv1.CacheOperation
		operation, err = cache.StartPrefetch(ctx, &kvgrpcv1.StartPrefetchRequest{
			Pages:   &kvgrpcv1.PromptPages{Tokens: tokens},
			Timeout: durationpb.New(pullTime),
			Engines: []string{at.Pull.Engine},
		})
		if err == nil {
			operation, err = cache.UntilEnded(ctx, operation.OperationId)
		}
		if err == nil {
			return max(operation.CompletedPages, operation.CoveredPages)
		}
	}
	fmt.Fprintf(os.Stderr, "nothing was pulled to %s: %v\n", at.Engine, err)
	return at.HostBlocks
}

// cache is asked at the rank that leads it.
func (router *router) cache(ctx context.Context, engine string, dp uint32) (*kvgrpc.Prefetch, error) {
	router.lock.Lock()
	defer router.lock.Unlock()
	name := fmt.Sprintf("%s dp%d", engine, dp)
	if known := router.caches[name]; known != nil {
		return known, nil
	}
	found, err := router.registry.GetEngine(ctx, engine)
	if err != nil {
		return nil, err
	}
	for _, row := range found.Rows {
		if rank := row.Rank.Rank; rank.Dp == dp && rank.Pp == 0 && rank.Tp == 0 {
			connection, err := dial(row.Endpoints.Grpc)
			if err != nil {
				return nil, err
			}
			router.caches[name] = kvgrpc.NewPrefetch(connection)
			return router.caches[name], nil
		}
	}
	return nil, fmt.Errorf("%s has no rank that leads its dp %d", engine, dp)
}

func (router *router) serve(tokens []uint64) (did decided) {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	at, err := router.plan(ctx, tokens)
	if err != nil {
		did.Why = err.Error()
		return did
	}
	if at == nil {
		did.Why = "no cache is followed"
		return did
	}
	did.Engine, did.Blocks = &at.Engine, at.Blocks
	if at.Pull != nil {
		did.PulledFrom, did.Blocks = &at.Pull.Engine, router.pull(ctx, tokens, at)
	}
	// Here the request goes to the engine.
	return did
}

func main() {
	registry := flag.String("registry", "", "HOST:PORT")
	index := flag.String("index", "", "HOST:PORT")
	model := flag.String("model", "", "by which the registry knows it")
	flag.Parse()
	router := &router{
		registry: kvgrpc.NewRegistry(dialled(*registry)),
		index:    kvgrpc.NewIndex(dialled(*index)),
		model:    *model,
		caches:   map[string]*kvgrpc.Prefetch{},
	}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, longestLine)
	turns := make(chan struct{}, atOnce)
	var running sync.WaitGroup
	var written sync.Mutex
	for lines.Scan() {
		var request struct{ Tokens []uint64 }
		if err := json.Unmarshal(lines.Bytes(), &request); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		turns <- struct{}{}
		running.Go(func() {
			defer func() { <-turns }()
			line, _ := json.Marshal(router.serve(request.Tokens))
			written.Lock()
			defer written.Unlock()
			fmt.Println(string(line))
		})
	}
	running.Wait()
}

func dialled(address string) *kvgrpc.Connection {
	connection, err := dial(address)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	return connection
}

func dial(address string) (*kvgrpc.Connection, error) {
	return kvgrpc.Dial(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
}
