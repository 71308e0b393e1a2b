package kvgrpc

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// What an index shows of a cache is a state that the cache really had, at any moment between two items, in the log that is not
// known to be over.
func TestWhatAnIndexShowsIsAlwaysAStateThatTheCacheHad(t *testing.T) {
	for seed := range uint64(50) {
		synctest.Test(t, func(t *testing.T) {
			world := &world{random: rand.New(rand.NewPCG(seed, 1)), states: map[string]map[string]bool{}}
			world.restart()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			one, shown, current := &followed{}, 0, 0
			check := func() {
				if !one.isShown(time.Now()) {
					return
				}
				shown++
				if one.logID != one.cache.logID || !world.states[one.logID][one.cache.shown()] {
					t.Fatalf("seed %d: of %s (%s) it shows %s", seed, one.logID, one.cache.logID, one.cache.shown())
				}
				if one.state() == kvgrpcv1.IndexSourceState_INDEX_SOURCE_STATE_CURRENT {
					current++
				}
			}
			watch := &watcher{
				client: world, cache: one, observer: checking{one, check}, snapshots: true,
				yield: func(Item) bool { check(); return true },
			}
			watch.run(ctx)
			if shown == 0 || current == 0 {
				t.Errorf("seed %d: shown %d times, current %d times", seed, shown, current)
			}
		})
	}
}

// checking looks at what is shown after whatever is told.
type checking struct {
	*followed
	check func()
}

func (checking checking) came(message *kvgrpcv1.WatchResponse) {
	checking.followed.came(message)
	checking.check()
}

func known(log string, hashes ...uint64) *followed {
	one := &followed{cacheKey: cacheKey{"e", 0}}
	one.came(begin(log, 3))
	one.Hear(Reset{log, true})
	var stored BlockStored
	for _, hash := range hashes {
		stored.Hashes = append(stored.Hashes, BlockHash{Value: hash})
	}
	one.Hear(Events{LogID: log, NextSequence: 3, Events: []Event{stored}, Complete: true})
	return one
}

func TestACacheThatNobodyReachesIsHiddenAfterHalfAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one, question := known("a", 1), Question{Hashes: []uint64{1}}
		one.Hear(Failed{Cause: errors.New("away")})
		time.Sleep(hideAfter - time.Second)
		one.Hear(Failed{Cause: errors.New("still away")})
		if one.score(question, time.Now()) == nil {
			t.Error("it is hidden at once")
		}
		question.MaxStaleness = 5 * time.Second
		if one.score(question, time.Now()) != nil {
			t.Error("it is told as fresh")
		}
		question.MaxStaleness = 0
		time.Sleep(2 * time.Second)
		if one.score(question, time.Now()) != nil {
			t.Error("it attracts requests for ever")
		}
		one.came(begin("a", 3))
		if one.score(question, time.Now()) == nil {
			t.Error("it is back, in the same log, and not told")
		}
	})
}

func TestAnotherLogHidesWhatWasKnownWithItsFirstMessage(t *testing.T) {
	one := known("a", 1)
	one.called()
	one.came(begin("b", 0))
	if one.score(Question{Hashes: []uint64{1}}, time.Now()) != nil {
		t.Error("log a is over, and told")
	}
}

func TestAnOldStateIsToldWhileASnapshotOfTheSameLogComes(t *testing.T) {
	one := known("a", 1)
	one.Hear(Reset{"a", true})
	one.Hear(Events{LogID: "a", NextSequence: 9, Events: []Event{BlockStored{Hashes: []BlockHash{{Value: 2}}}}})
	told := one.score(Question{Hashes: []uint64{1, 2}}, time.Now())
	if told.GetBlocks() != 1 || told.Freshness.State != kvgrpcv1.IndexSourceState_INDEX_SOURCE_STATE_REBUILDING {
		t.Error(told)
	}
	one.Hear(Events{LogID: "a", NextSequence: 9, Complete: true})
	if told := one.score(Question{Hashes: []uint64{2}}, time.Now()); told.GetFreshness().GetNextSequence() != 9 {
		t.Error(told)
	}
	if one.score(Question{Hashes: []uint64{1}}, time.Now()) != nil {
		t.Error("what the snapshot does not hold is told")
	}
}

func BenchmarkAScoreOf375BlocksAmong100Caches(b *testing.B) {
	index := &PrefixIndex{followers: map[cacheKey]*followed{}}
	hashes := make([]uint64, 375)
	for position := range hashes {
		hashes[position] = mix(uint64(position))
	}
	for dp := range uint32(100) {
		one := known("a", hashes[:int(dp)*len(hashes)/100]...)
		one.cacheKey = cacheKey{"e", dp}
		index.followers[one.cacheKey] = one
	}
	for b.Loop() {
		if scores, err := index.Score(Question{Hashes: hashes}); err != nil || len(scores) != 99 {
			b.Fatal(len(scores), err)
		}
	}
}
