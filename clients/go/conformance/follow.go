package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	kvgrpc "kvgrpc.dev/go"
	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// watched is what a watch of engines has told: the newest of each engine.
type watched struct {
	cancel  context.CancelFunc
	mutex   sync.Mutex
	engines map[string]*kvgrpcv1.Engine
	whole   bool
}

func (driver *driver) watchEngines(_ context.Context, asked command) (string, error) {
	registry, err := driver.registry(asked)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithCancel(context.Background())
	watch := &watched{cancel: cancel, engines: map[string]*kvgrpcv1.Engine{}}
	driver.watches[asked.As] = watch
	go func() {
		for message, err := range registry.WatchEngines(ctx, &kvgrpcv1.WatchEnginesRequest{}) {
			if err == nil {
				watch.hear(message)
			}
		}
	}()
	return "watching", nil
}

func (watch *watched) hear(message *kvgrpcv1.WatchEnginesResponse) {
	watch.mutex.Lock()
	defer watch.mutex.Unlock()
	for _, change := range message.Changes {
		watch.engines[change.Engine.Name] = change.Engine
	}
	watch.whole = watch.whole || message.StateComplete
}

func (driver *driver) untilEngine(ctx context.Context, asked command) (string, error) {
	watch := driver.watches[asked.As]
	var line string
	err := until(ctx, func() bool {
		watch.mutex.Lock()
		defer watch.mutex.Unlock()
		engine := watch.engines[asked.Engine]
		line = asked.Engine + " gone"
		if asked.Ranks > 0 {
			line = headLine(engine)
		}
		return watch.whole && engine.GetRegisteredRanks() == asked.Ranks
	})
	return line, err
}

// followed is what the goroutine of a follower hands to others: its cache is its own.
type followed struct {
	cancel    context.CancelFunc
	questions chan func(*kvgrpc.Cache)

	mutex sync.Mutex
	// All batches before next are in; the publisher has those before upcoming.
	next, upcoming       uint64
	exact                bool
	contents             string
	logs                 []string
	snapshots, different int
	failures, told       int
}

func (driver *driver) follow(_ context.Context, asked command) (string, error) {
	connection, err := driver.dial(asked, asked.Address)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithCancel(context.Background())
	follower := &followed{cancel: cancel, questions: make(chan func(*kvgrpc.Cache))}
	driver.followers[asked.As] = follower
	client := kvgrpcv1.NewEventServiceClient(connection)
	go func() {
		var cache kvgrpc.Cache
		for item := range kvgrpc.Follow(ctx, client, kvgrpc.Stream{}, &cache) {
			follower.hear(item, &cache)
			select {
			case question := <-follower.questions:
				question(&cache)
			default:
			}
		}
	}()
	return "following", nil
}

func (follower *followed) hear(item kvgrpc.Item, cache *kvgrpc.Cache) {
	follower.mutex.Lock()
	defer follower.mutex.Unlock()
	switch item := item.(type) {
	case kvgrpc.Void:
		follower.exact = false
		if errors.Is(item.Cause, kvgrpc.ErrDiffers) {
			follower.different++
		}
	case kvgrpc.Reset:
		follower.exact = false
		follower.snapshots++
		if !slices.Contains(follower.logs, item.LogID) {
			follower.logs = append(follower.logs, item.LogID)
		}
	case kvgrpc.Events:
		follower.exact = item.Complete
		follower.next = item.NextSequence
	case kvgrpc.Current:
		follower.upcoming = item.NextSequence + item.Lag
	case kvgrpc.Failed:
		follower.failures++
	}
	follower.contents = contentsLine(follower.next, cache)
}

func (driver *driver) untilCurrent(ctx context.Context, asked command) (string, error) {
	return driver.followers[asked.As].once(ctx, func(follower *followed) bool {
		return follower.exact && follower.next == number(asked.Next) && follower.upcoming <= follower.next
	})
}

func (driver *driver) untilFailed(ctx context.Context, asked command) (string, error) {
	line, err := driver.followers[asked.As].once(ctx, func(follower *followed) bool {
		return follower.failures > follower.told
	})
	return "failed " + line, err
}

// once gives the contents at the moment at which the condition is met.
func (follower *followed) once(ctx context.Context, condition func(*followed) bool) (line string, err error) {
	err = until(ctx, func() bool {
		follower.mutex.Lock()
		defer follower.mutex.Unlock()
		if !condition(follower) {
			return false
		}
		follower.told = follower.failures
		line = follower.contents
		return true
	})
	return line, err
}

func contentsLine(next uint64, cache *kvgrpc.Cache) string {
	counts := map[string]int{}
	for place, blocks := range cache.Blocks() {
		counts[place.Medium] += blocks
	}
	media := slices.Sorted(maps.Keys(counts))
	blocks := joined(media, ",", func(medium string) string { return fmt.Sprintf("%s:%d", medium, counts[medium]) })
	return fmt.Sprintf("next=%d blocks=%s whole=%t doubtful=%t", next, blocks, cache.Whole(), cache.Doubtful())
}

func (driver *driver) counts(_ context.Context, asked command) (string, error) {
	follower := driver.followers[asked.As]
	follower.mutex.Lock()
	defer follower.mutex.Unlock()
	return fmt.Sprintf("snapshots=%d logs=%d different=%d", follower.snapshots, len(follower.logs), follower.different), nil
}

func (driver *driver) holds(ctx context.Context, asked command) (string, error) {
	answer := make(chan bool, 1)
	question := func(cache *kvgrpc.Cache) {
		answer <- cache.Holds(kvgrpc.Place{Medium: asked.Medium}, kvgrpc.BlockHash{Value: number(asked.Hash)})
	}
	select {
	case driver.followers[asked.As].questions <- question:
		return fmt.Sprint(<-answer), nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (driver *driver) close(_ context.Context, asked command) (string, error) {
	if registration := driver.registrations[asked.As]; registration != nil {
		delete(driver.registrations, asked.As)
		return "closed", registration.Close()
	}
	if watch := driver.watches[asked.As]; watch != nil {
		delete(driver.watches, asked.As)
		watch.cancel()
	} else {
		driver.followers[asked.As].cancel()
		delete(driver.followers, asked.As)
	}
	return "closed", nil
}
