package kvgrpc

import (
	"context"
	"iter"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

const (
	// Under load a publisher's digest is older than what its readers have by then: both keep those of multiples of this.
	checkpointBatches = 64
	checkpoints       = 64
)

// Verdict is what comparing with a publisher's digest says.
type Verdict int

const (
	// Unknown: there was no digest, or of a moment that is not kept any more, or the cache was not seen from its beginning.
	Unknown Verdict = iota
	// Equal: this was the publisher's state at that moment.
	Equal
	// Different: something is lost, here or there. Begin again with a snapshot.
	Different
)

// Hear takes an item of a Watch, in order, and compares where it brings the publisher's digest.
//
// What a snapshot says is shown once it is complete and comes to its own digest; until then what was known before it is. A
// snapshot that does not is Different, and changes nothing.
func (cache *Cache) Hear(item Item) Verdict {
	switch item := item.(type) {
	case Void:
		cache.forget()
	case Reset:
		if item.LogID != cache.logID {
			cache.forget()
		}
		cache.logID = item.LogID
		cache.shadow = &Cache{logID: item.LogID, partial: !item.Whole}
	case Events:
		return cache.hearEvents(item)
	case Current:
		return cache.Compare(item.State)
	}
	return Unknown
}

func (cache *Cache) hearEvents(item Events) Verdict {
	told := cache
	if cache.shadow != nil {
		told = cache.shadow
	}
	told.Apply(item.Events)
	if !item.Complete {
		return Unknown
	}
	told.advance(item.NextSequence)
	verdict := told.Compare(item.State)
	if told != cache && item.State.GetDoubtful() {
		// Its publisher cannot read what came either.
		told.doubtful, told.doubtAt = true, item.NextSequence
	}
	switch {
	case told == cache:
	case verdict == Different:
		cache.shadow = nil
	default:
		*cache = *told
	}
	return verdict
}

func (cache *Cache) forget() {
	*cache = Cache{partial: true, logID: cache.logID}
}

// Compare says whether this was what it held at the moment of a publisher's digest: that of now, or of one of the last
// checkpoints. It knows moments by what Hear was told.
func (cache *Cache) Compare(state *kvgrpcv1.StateDigest) Verdict {
	if state == nil || cache.partial || state.Kind > kvgrpcv1.DigestKind_DIGEST_KIND_MIX64_SUM {
		return Unknown
	}
	own, isKnown := cache.past[state.NextSequence]
	if state.NextSequence == cache.next {
		own, isKnown = cache.digest(), true
	}
	switch {
	case !isKnown:
		return Unknown
	case sameTiers(own, state.GetTiers()):
		if !state.Doubtful && cache.doubtAt < state.NextSequence {
			// Its publisher can read what came before, and the blocks are these.
			cache.doubtful = false
		}
		return Equal
	case state.Doubtful && !cache.doubtful:
		// It counts blocks that may be gone, by an event that was read here.
		return Unknown
	}
	return Different
}

func (cache *Cache) advance(next uint64) {
	cache.next = next
	if next%checkpointBatches != 0 || cache.partial {
		return
	}
	if cache.past == nil {
		cache.past = map[uint64][]*kvgrpcv1.TierDigest{}
	}
	cache.past[next] = cache.digest()
	// Holes of dropped batches may step over one: the number is bounded all the same.
	for old := range cache.past {
		if old+checkpoints*checkpointBatches <= next {
			delete(cache.past, old)
		}
	}
}

// Follow is Watch with a cache that hears everything before it is yielded, and that begins again with a snapshot where its
// digest differs from the publisher's. What is yielded may be looked at in the cache until the next item is asked for.
func Follow(ctx context.Context, client kvgrpcv1.EventServiceClient, stream Stream, cache *Cache) iter.Seq[Item] {
	return func(yield func(Item) bool) {
		(&watcher{client: client, stream: stream, yield: yield, snapshots: true, cache: cache}).run(ctx)
	}
}
