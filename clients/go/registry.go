package kvgrpc

import (
	"context"
	"errors"
	"iter"
	"time"

	"google.golang.org/grpc"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// Registry asks a registry who serves what, and keeps rows of this process there. Reads are repeated while it is away, up to the
// deadline of their context. Any goroutine may use it.
type Registry struct {
	client kvgrpcv1.RegistryServiceClient
	// Replicas of one registry, the one that is asked first among them.
	replicas []kvgrpcv1.RegistryServiceClient
}

// Engines is a list of engines, by name. WarmingUp: the registry started a moment ago, and there may be more.
type Engines struct {
	Engines   []*kvgrpcv1.Engine
	WarmingUp bool
}

// NewRegistry takes a connection of Dial, and those to replicas of the same registry: a Registration goes on at the next one where
// one does not answer.
func NewRegistry(connection grpc.ClientConnInterface, replicas ...grpc.ClientConnInterface) *Registry {
	registry := &Registry{client: kvgrpcv1.NewRegistryServiceClient(connection)}
	registry.replicas = []kvgrpcv1.RegistryServiceClient{registry.client}
	for _, replica := range replicas {
		registry.replicas = append(registry.replicas, kvgrpcv1.NewRegistryServiceClient(replica))
	}
	return registry
}

// GetEngine gives one engine with all of its rows.
func (registry *Registry) GetEngine(ctx context.Context, engine string) (*kvgrpcv1.Engine, error) {
	request := &kvgrpcv1.GetEngineRequest{Engine: engine, PageSize: mostPageRows}
	var whole *kvgrpcv1.Engine
	err := eachPage(func(token string) (string, error) {
		request.PageToken = token
		page, err := ask(ctx, registry.client.GetEngine, request)
		if whole == nil {
			whole = page.GetEngine()
		} else {
			whole.Rows = append(whole.Rows, page.GetEngine().GetRows()...)
		}
		return page.GetNextPageToken(), err
	})
	if err != nil {
		return nil, err
	}
	return whole, nil
}

// ListEngines gives all engines of a role (unspecified: of any), with their rows where that is asked for.
func (registry *Registry) ListEngines(ctx context.Context, role kvgrpcv1.Role, includeRows bool) (Engines, error) {
	request := &kvgrpcv1.ListEnginesRequest{Role: role, IncludeRows: includeRows, PageSize: mostPageRows}
	var found Engines
	err := eachPage(func(token string) (string, error) {
		request.PageToken = token
		page, err := ask(ctx, registry.client.ListEngines, request)
		found.Engines = append(found.Engines, page.GetEngines()...)
		found.WarmingUp = found.WarmingUp || page.GetWarmingUp()
		return page.GetNextPageToken(), err
	})
	if err != nil {
		return Engines{}, err
	}
	return found, nil
}

// ResolveRanks gives an engine with the rows that any of the selectors fits; with WaitReady once it is READY.
func (registry *Registry) ResolveRanks(
	ctx context.Context, request *kvgrpcv1.ResolveRanksRequest,
) (*kvgrpcv1.Engine, error) {
	resolved, err := ask(ctx, registry.client.ResolveRanks, request)
	return resolved.GetEngine(), err
}

// WatchEngines tells the full state of the registry, then what changes. It ends with an error, and is not resumed by itself: watch
// again. A registry that said nothing for 15 s (a message comes each 5 s) is taken for gone.
func (registry *Registry) WatchEngines(
	ctx context.Context, request *kvgrpcv1.WatchEnginesRequest,
) iter.Seq2[*kvgrpcv1.WatchEnginesResponse, error] {
	return messages(ctx, registryIdle, func(ctx context.Context) (grpc.ServerStreamingClient[kvgrpcv1.WatchEnginesResponse], error) {
		return registry.client.WatchEngines(ctx, request)
	})
}

// messages are those of one call, until it ends: with an error, or by itself, or where nothing comes for so long.
func messages[Message any](
	ctx context.Context, idle time.Duration, call func(context.Context) (grpc.ServerStreamingClient[Message], error),
) iter.Seq2[*Message, error] {
	return func(yield func(*Message, error) bool) {
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		alive := time.AfterFunc(idle, func() { cancel(errSilent) })
		defer alive.Stop()
		stream, err := call(ctx)
		for err == nil {
			alive.Reset(idle)
			var message *Message
			message, err = stream.Recv()
			// What the reader takes for a message is not the server's silence.
			alive.Stop()
			if err == nil && !yield(message, nil) {
				return
			}
		}
		if !endedWell(err) {
			yield(nil, silent(ctx, err))
		}
	}
}

var errEnded = errors.New("the registry ended the stream")
