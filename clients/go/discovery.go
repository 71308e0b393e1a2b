package kvgrpc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

const (
	// Sources that were named are asked who they are so often, and engines that went are looked at.
	lookInterval = 2 * time.Second
	answerWithin = 5 * time.Second
	// A registry says something each 5 s.
	registryIdle = 15 * time.Second
	// Of one source: nobody publishes as many.
	mostStreamPages = 100
)

var errRegistrySilent = fmt.Errorf("the registry said nothing for %s", registryIdle)

// What a registry says.

func (index *PrefixIndex) watchEngines(ctx context.Context) {
	pause := firstPause
	for at := 0; ctx.Err() == nil; at++ {
		address, began := index.options.Registries[at%len(index.options.Registries)], time.Now()
		err := index.watchRegistry(ctx, address)
		if ctx.Err() != nil {
			return
		}
		index.lack(address, err.Error())
		if time.Since(began) > longestPause {
			pause = firstPause
		}
		sleep(ctx, pause/2+rand.N(pause/2))
		pause = min(2*pause, longestPause)
	}
}

// watchRegistry follows the engines of one registry. The error is why it ended, never nil.
func (index *PrefixIndex) watchRegistry(ctx context.Context, address string) error {
	connection, err := index.options.Dial(address)
	if err != nil {
		return err
	}
	defer connection.Close()
	calling, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// Followers that it leads to live on.
	alive := time.AfterFunc(registryIdle, func() { cancel(errRegistrySilent) })
	defer alive.Stop()
	request := &kvgrpcv1.WatchEnginesRequest{WithoutPools: true}
	call, err := kvgrpcv1.NewRegistryServiceClient(connection).WatchEngines(calling, request)
	for err == nil {
		var message *kvgrpcv1.WatchEnginesResponse
		if message, err = call.Recv(); err == nil {
			alive.Reset(registryIdle)
			index.hearRegistry(ctx, address, message)
		}
	}
	if context.Cause(calling) == errRegistrySilent {
		return errRegistrySilent
	}
	return err
}

func (index *PrefixIndex) hearRegistry(ctx context.Context, address string, message *kvgrpcv1.WatchEnginesResponse) {
	index.mutex.Lock()
	defer index.mutex.Unlock()
	delete(index.lacking, address)
	for name := range index.mirror.apply(message) {
		index.engineChanged(ctx, name)
	}
}

func (index *PrefixIndex) engineChanged(ctx context.Context, name string) {
	before, now := index.listed[name], map[cacheKey]cachePlace{}
	delete(index.listed, name)
	for about := range index.lacking {
		if about == name || strings.HasPrefix(about, name+" dp") {
			delete(index.lacking, about)
		}
	}
	if engine := index.mirror.engines[name]; engine != nil {
		for _, row := range engine.publishers() {
			key := cacheKey{name, row.GetRank().GetRank().GetDp()}
			if address := row.GetEndpoints().GetGrpc(); address != "" {
				now[key] = cachePlace{address, engine.head.GetModel().GetName(), row.GetLabels()}
			} else {
				index.lacking[key.String()] = "it serves events, and its row names no gRPC address"
			}
		}
		index.listed[name] = now
		if len(now) == 0 {
			index.lacking[name] = fmt.Sprintf("none of its %d registered ranks serves events", engine.head.RegisteredRanks)
		} else if missing := engine.head.DpLackingEvents; len(missing) > 0 {
			index.lacking[name] = fmt.Sprintf("dp ranks %s serve no events, others of it do", firstOf(missing))
		}
	}
	for key := range before {
		if _, isStill := now[key]; !isStill {
			index.gone[key] = true
		}
	}
	for key := range now {
		delete(index.gone, key)
	}
	index.follow(ctx, now)
}

func (key cacheKey) String() string { return fmt.Sprintf("%s dp%d", key.engine, key.dp) }

func firstOf(dpRanks []uint32) string {
	const shown = 8
	words := strings.Trim(fmt.Sprint(dpRanks[:min(len(dpRanks), shown)]), "[]")
	words = strings.ReplaceAll(words, " ", ", ")
	if len(dpRanks) > shown {
		words += ", ..."
	}
	return words
}

// Sources that were named.

func (index *PrefixIndex) look(ctx context.Context) {
	for ctx.Err() == nil {
		var asking sync.WaitGroup
		for _, address := range index.unknownSources() {
			asking.Go(func() { index.askSource(ctx, address) })
		}
		asking.Wait()
		index.letGo(ctx)
		sleep(ctx, lookInterval)
	}
}

func (index *PrefixIndex) unknownSources() (unknown []string) {
	index.mutex.RLock()
	defer index.mutex.RUnlock()
	known := map[string]bool{}
	for _, each := range index.followers {
		known[each.address] = true
	}
	for _, address := range index.options.Sources {
		if !known[address] {
			known[address], unknown = true, append(unknown, address)
		}
	}
	return unknown
}

func (index *PrefixIndex) askSource(ctx context.Context, address string) {
	places, err := index.streamsOf(ctx, address)
	if ctx.Err() != nil {
		return
	}
	if err == nil && len(places) == 0 {
		err = errors.New("it serves no stream of events")
	}
	index.mutex.Lock()
	defer index.mutex.Unlock()
	if err != nil {
		index.lacking[address] = err.Error()
		return
	}
	delete(index.lacking, address)
	index.follow(ctx, places)
}

func (index *PrefixIndex) streamsOf(ctx context.Context, address string) (map[cacheKey]cachePlace, error) {
	connection, err := index.options.Dial(address)
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	places := map[cacheKey]cachePlace{}
	request := &kvgrpcv1.ListStreamsRequest{PageSize: 1000}
	pages := 0
	err = eachPage(func(token string) (string, error) {
		if pages++; pages > mostStreamPages {
			return "", fmt.Errorf("it lists more than %d pages of streams", mostStreamPages)
		}
		request.PageToken = token
		page, err := kvgrpcv1.NewEventServiceClient(connection).ListStreams(ctx, request)
		for _, stream := range page.GetStreams() {
			places[cacheKey{stream.Engine, stream.Dp}] = cachePlace{address: address}
		}
		return page.GetNextPageToken(), err
	})
	if err != nil {
		return nil, err
	}
	return places, nil
}

// Followers. All of these want the mutex.

func (index *PrefixIndex) follow(ctx context.Context, places map[cacheKey]cachePlace) {
	for key, place := range places {
		known := index.followers[key]
		if known != nil && known.is(place) {
			continue
		}
		index.unfollow(key)
		connection, err := index.options.Dial(place.address)
		if err != nil {
			index.lacking[key.String()] = err.Error()
			continue
		}
		delete(index.lacking, key.String())
		following, stop := context.WithCancel(ctx)
		each := &followed{cacheKey: key, cachePlace: place, stop: stop}
		index.followers[key] = each
		index.running.Go(func() {
			defer connection.Close()
			each.run(following, kvgrpcv1.NewEventServiceClient(connection))
		})
	}
}

func (index *PrefixIndex) unfollow(key cacheKey) {
	if known := index.followers[key]; known != nil {
		known.stop()
		delete(index.followers, key)
	}
}

// letGo ends what a registry lists no more and does not answer either; what could not be begun is tried again.
func (index *PrefixIndex) letGo(ctx context.Context) {
	index.mutex.Lock()
	defer index.mutex.Unlock()
	named := map[string]bool{}
	for _, address := range index.options.Sources {
		named[address] = true
	}
	for key := range index.gone {
		known := index.followers[key]
		switch {
		case index.mirror.warmingUp:
		case known == nil || named[known.address]:
			delete(index.gone, key)
		case known.isConnecting():
			delete(index.gone, key)
			index.unfollow(key)
		}
	}
	for _, places := range index.listed {
		missing := map[cacheKey]cachePlace{}
		for key, place := range places {
			if index.followers[key] == nil {
				missing[key] = place
			}
		}
		index.follow(ctx, missing)
	}
}

func (index *PrefixIndex) lack(what, why string) {
	index.mutex.Lock()
	defer index.mutex.Unlock()
	index.lacking[what] = why
}

func sleep(ctx context.Context, pause time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(pause):
	}
}
