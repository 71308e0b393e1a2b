package kvgrpc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// IndexOptions say what a PrefixIndex follows, and how it dials.
type IndexOptions struct {
	// Registries are replicas of one registry: where one does not answer, the next is asked. Every engine whose events it says
	// are served is followed, as they come and go.
	Registries []string
	// Sources are ranks that are followed besides, by the addresses of their gRPC.
	Sources []string
	// Dial connects to a registry or a rank; Dial of this package, with your credentials. It must not wait.
	Dial func(address string) (*Connection, error)
}

// Question is the beginning of one request, and which caches are told.
type Question struct {
	// Hashes are those of its blocks, in order: BlockHash.Key of what events carry.
	Hashes []uint64
	// Chains are its hashes for caches whose blocks have so many tokens, where several page sizes are followed; Hashes are for
	// the others.
	Chains map[int][]uint64
	// StepTokens is how many tokens lie from hash to hash of Hashes; 0: a block.
	StepTokens int
	// Model names what engines run, by ModelIdentity.name at the registry; "": any, if all that are asked run one.
	Model string
	// Labels leaves out caches of ranks that lack one of these at the registry.
	Labels map[string]string
	// Engines are the only ones that are told; none: all.
	Engines []string
	// Most is how many scores are told, the best; 0: all.
	Most int
	// MaxStaleness leaves out caches that were not known to be exact at most so long ago; 0: none.
	MaxStaleness time.Duration
}

// fitting gives the hashes for a cache of a page size, every how many is a block, and their step. None: it cannot be asked.
func (question Question) fitting(pageTokens int) (hashes []uint64, stride, step int) {
	if len(question.Chains) == 0 && question.StepTokens <= 0 {
		return question.Hashes, 1, 0
	}
	if chain, fits := question.Chains[pageTokens]; fits {
		return chain, 1, 0
	}
	step = max(question.StepTokens, 0)
	between := max(1, orElse(step, pageTokens))
	if pageTokens%between != 0 {
		return nil, 1, 0
	}
	return question.Hashes, max(1, pageTokens/between), step
}

// Source is one cache that is followed. LastError is why it last failed; nil: never.
type Source struct {
	Engine     string
	DP         uint32
	Address    string
	Model      string
	Labels     map[string]string
	Freshness  *kvgrpcv1.Freshness
	Blocks     map[Place]int
	PageTokens int
	LastError  error
}

// ModelNeeded says that a Question named no model, and that the caches which were asked are of several: hashes do not tell them
// apart. Name one of them.
type ModelNeeded struct{ Models []string }

func (needed *ModelNeeded) Error() string {
	return fmt.Sprintf("Question.Model is %q, and these caches are of several models: name one of %q", "", needed.Models)
}

// PrefixIndex says who holds the beginning of a request, over the caches of many engines, in process: the same answers as
// IndexService. Any goroutine may use it.
//
// An engine that the registry does not list any more is followed as long as it answers: a registry's silence proves nothing. What
// cannot be followed, NotFollowed says.
type PrefixIndex struct {
	options IndexOptions
	cancel  context.CancelFunc
	running sync.WaitGroup

	mutex     sync.RWMutex
	mirror    *engineMirror
	followers map[cacheKey]*followed
	// Of each engine at the registry: where its caches are.
	listed map[string]map[cacheKey]cachePlace
	gone   map[cacheKey]bool
	// What is not followed, by what it is about.
	lacking map[string]string
}

// NewPrefixIndex begins to follow. Close ends it.
func NewPrefixIndex(options IndexOptions) (*PrefixIndex, error) {
	switch {
	case options.Dial == nil:
		return nil, errors.New("IndexOptions.Dial is nil: give a function that calls Dial with your credentials")
	case len(options.Registries)+len(options.Sources) == 0:
		return nil, errors.New("IndexOptions.Registries and Sources are empty: name a registry, or ranks")
	case slices.Contains(options.Registries, "") || slices.Contains(options.Sources, ""):
		return nil, errors.New("IndexOptions has an empty address: HOST:PORT was expected")
	}
	ctx, cancel := context.WithCancel(context.Background())
	index := &PrefixIndex{
		options:   options,
		cancel:    cancel,
		mirror:    newEngineMirror(),
		followers: map[cacheKey]*followed{},
		listed:    map[string]map[cacheKey]cachePlace{},
		gone:      map[cacheKey]bool{},
		lacking:   map[string]string{},
	}
	index.running.Go(func() { index.look(ctx) })
	if len(options.Registries) > 0 {
		index.running.Go(func() { index.watchEngines(ctx) })
	}
	return index, nil
}

// Close ends all followers.
func (index *PrefixIndex) Close() {
	index.cancel()
	index.running.Wait()
}

// Score tells the caches that hold the first block, those with most tokens first, then those with most of it on the device, then by
// engine and dp. The error is a ModelNeeded.
func (index *PrefixIndex) Score(question Question) ([]*kvgrpcv1.CacheScore, error) {
	asked, err := index.asked(question)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	var scores []*kvgrpcv1.CacheScore
	for _, each := range asked {
		if score := each.score(question, now); score != nil {
			scores = append(scores, score)
		}
	}
	slices.SortFunc(scores, func(a, b *kvgrpcv1.CacheScore) int {
		return cmp.Or(
			cmp.Compare(tokensIn(b), tokensIn(a)),
			cmp.Compare(b.DeviceBlocks, a.DeviceBlocks),
			cmp.Compare(a.Engine, b.Engine),
			cmp.Compare(a.Dp, b.Dp),
		)
	})
	if question.Most > 0 && len(scores) > question.Most {
		scores = scores[:question.Most]
	}
	return scores, nil
}

func tokensIn(score *kvgrpcv1.CacheScore) uint64 {
	return uint64(score.Blocks) * uint64(max(1, score.PageTokens))
}

// asked are the caches that a question is about.
func (index *PrefixIndex) asked(question Question) ([]*followed, error) {
	index.mutex.RLock()
	defer index.mutex.RUnlock()
	asked := make([]*followed, 0, len(index.followers))
	var models []string
	for key, each := range index.followers {
		if len(question.Engines) > 0 && !slices.Contains(question.Engines, key.engine) {
			continue
		}
		if !each.hasLabels(question.Labels) || (question.Model != "" && each.model != question.Model) {
			continue
		}
		if each.model != "" && !slices.Contains(models, each.model) {
			models = append(models, each.model)
		}
		asked = append(asked, each)
	}
	if len(models) > 1 {
		slices.Sort(models)
		return nil, &ModelNeeded{models}
	}
	return asked, nil
}

// Sources are all caches that are followed, by engine and dp.
func (index *PrefixIndex) Sources() []Source {
	index.mutex.RLock()
	defer index.mutex.RUnlock()
	now := time.Now()
	sources := make([]Source, 0, len(index.followers))
	for _, each := range index.followers {
		sources = append(sources, each.source(now))
	}
	slices.SortFunc(sources, func(a, b Source) int {
		return cmp.Or(cmp.Compare(a.Engine, b.Engine), cmp.Compare(a.DP, b.DP))
	})
	return sources
}

// NotFollowed is what cannot be followed now, each with its reason: "ENGINE: why", "ADDRESS: why".
func (index *PrefixIndex) NotFollowed() []string {
	index.mutex.RLock()
	defer index.mutex.RUnlock()
	lines := make([]string, 0, len(index.lacking))
	for what, why := range index.lacking {
		lines = append(lines, what+": "+why)
	}
	slices.Sort(lines)
	return lines
}

// UntilCurrent waits until so many caches are current. The error is that of ctx.
func (index *PrefixIndex) UntilCurrent(ctx context.Context, caches int) error {
	for ctx.Err() == nil {
		current := 0
		for _, source := range index.Sources() {
			if source.Freshness.State == kvgrpcv1.IndexSourceState_INDEX_SOURCE_STATE_CURRENT {
				current++
			}
		}
		if current >= caches {
			return nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
	return ctx.Err()
}
