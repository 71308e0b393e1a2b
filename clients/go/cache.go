package kvgrpc

import (
	"slices"
	"sort"
	"strings"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

// A cache holds blocks in so many places at most, whose names have so many bytes at most; what names another one is passed
// over, by every reader.
const (
	MaxPlaces      = 1024
	MaxMediumBytes = 128
)

// Place is a tier and group: the engine's name of the tier in capitals, "GPU" where it named none.
type Place struct {
	Medium string
	Group  uint32
}

// Cache is what one cache holds by what its events said. The zero value is an empty cache.
//
// A block that is stored twice is there until it is removed twice; what is removed and was not there changes nothing. What it
// shows while Hear is given a snapshot is the state before it, until the snapshot is complete.
type Cache struct {
	copies map[Place]map[uint64]int
	mixed  map[Place]uint64
	// All batches before next are in. past are the digests of the last checkpoints. partial: it was not seen from its
	// beginning, and nothing cleared it since.
	next    uint64
	past    map[uint64][]*kvgrpcv1.TierDigest
	partial bool
	logID   string
	// With a batch from doubtAt on something may have been removed that cannot be read here.
	doubtful bool
	doubtAt  uint64
	// Tokens in a block as last told, 0 before; and what the other groups than the first are.
	pageTokens int
	groups     map[uint32]cacheGroup
	// What a snapshot has said so far; nil outside of one.
	shadow *Cache
}

// Apply takes the events of one batch, in order.
func (cache *Cache) Apply(events []Event) {
	for _, event := range events {
		switch event := event.(type) {
		case BlockStored:
			cache.store(placeOf(event.Medium, event.Group), event.Hashes)
			cache.learn(event)
		case BlockRemoved:
			cache.remove(placeOf(event.Medium, event.Group), event.Hashes)
		case AllBlocksCleared:
			cache.Clear()
			cache.partial = false
		case TierBlocksCleared:
			cache.clearTier(placeOf(event.Medium, 0).Medium)
		case UnknownEvent:
			if event.Name != "BlockStored" {
				cache.doubtful, cache.doubtAt = true, cache.next
			}
		}
	}
}

// Clear empties it.
func (cache *Cache) Clear() {
	cache.copies, cache.mixed, cache.doubtful = nil, nil, false
}

// Doubtful says that an event which cannot be read here may have been a removal: blocks that it shows may be gone. It ends with a
// digest or snapshot of a publisher that can read it, or when everything is cleared.
func (cache *Cache) Doubtful() bool {
	return cache.doubtful
}

// Whole says that it shows all that the cache held at some moment: not where it is doubtful, and not where the log began before what
// could be read, no snapshot is served, and nothing was cleared since (then there may be more blocks, never fewer).
func (cache *Cache) Whole() bool {
	return !cache.partial && !cache.doubtful
}

func (cache *Cache) clearTier(medium string) {
	for place := range cache.copies {
		if place.Medium == medium {
			delete(cache.copies, place)
			delete(cache.mixed, place)
		}
	}
}

// Holds says whether a block is in a place.
func (cache *Cache) Holds(place Place, hash BlockHash) bool {
	return cache.copies[place][hash.Key()] > 0
}

// Blocks counts the different blocks of each place that has any.
func (cache *Cache) Blocks() map[Place]int {
	counts := map[Place]int{}
	for place, copies := range cache.copies {
		counts[place] = len(copies)
	}
	return counts
}

// Is compares with what the publisher says of its own state at the same sequence.
func (cache *Cache) Is(state *kvgrpcv1.StateDigest) bool {
	return sameTiers(cache.digest(), state.GetTiers())
}

func sameTiers(digest, told []*kvgrpcv1.TierDigest) bool {
	return slices.EqualFunc(digest, told, func(own, their *kvgrpcv1.TierDigest) bool {
		same := own.Medium == their.Medium && own.Group == their.Group && own.Blocks == their.Blocks
		return same && own.MixedHashes == their.MixedHashes
	})
}

func (cache *Cache) digest() []*kvgrpcv1.TierDigest {
	var tiers []*kvgrpcv1.TierDigest
	for place, count := range cache.Blocks() {
		tiers = append(tiers, &kvgrpcv1.TierDigest{
			Medium: place.Medium, Group: place.Group, Blocks: uint64(count), MixedHashes: cache.mixed[place],
		})
	}
	sort.Slice(tiers, func(a, b int) bool {
		if tiers[a].Medium != tiers[b].Medium {
			return tiers[a].Medium < tiers[b].Medium
		}
		return tiers[a].Group < tiers[b].Group
	})
	return tiers
}

func (cache *Cache) store(place Place, hashes []BlockHash) {
	if cache.copies == nil {
		cache.copies, cache.mixed = map[Place]map[uint64]int{}, map[Place]uint64{}
	}
	if cache.copies[place] == nil {
		if len(hashes) == 0 || len(cache.copies) >= MaxPlaces || len(place.Medium) > MaxMediumBytes {
			return
		}
		cache.copies[place] = map[uint64]int{}
	}
	for _, hash := range hashes {
		key := hash.Key()
		cache.mixed[place] += mix(key)
		cache.copies[place][key]++
	}
}

func (cache *Cache) remove(place Place, hashes []BlockHash) {
	for _, hash := range hashes {
		key := hash.Key()
		switch cache.copies[place][key] {
		case 0:
			continue
		case 1:
			delete(cache.copies[place], key)
		default:
			cache.copies[place][key]--
		}
		cache.mixed[place] -= mix(key)
	}
	if len(cache.copies[place]) == 0 {
		delete(cache.copies, place)
		delete(cache.mixed, place)
	}
}

func placeOf(medium string, group int64) Place {
	if medium == "" {
		medium = "GPU"
	}
	return Place{asciiUpper(medium), uint32(group)}
}

// Only a to z: what else a name holds is left as it is, in every language.
func asciiUpper(text string) string {
	return strings.Map(func(letter rune) rune {
		if 'a' <= letter && letter <= 'z' {
			return letter - 'a' + 'A'
		}
		return letter
	}, text)
}

// The finalizer of splitmix64, as docs/events.md has it.
func mix(key uint64) uint64 {
	key += 0x9E3779B97F4A7C15
	key = (key ^ key>>30) * 0xBF58476D1CE4E5B9
	key = (key ^ key>>27) * 0x94D049BB133111EB
	return key ^ key>>31
}
