package kvgrpc

import "math"

const (
	// Prefixes are matched in the group of full attention, which engines number first; the others hold parts of a sequence.
	prefixGroup = 0
	mostGroups  = 64
)

// How far one has to reach for a block, the fastest first.
const (
	onDevice = iota
	onHost
	onDisk
	inStore
	nowhere
)

func reachOf(medium string) int {
	switch medium {
	case "GPU":
		return onDevice
	case "CPU", "CPU_PINNED":
		return onHost
	case "DISK":
		return onDisk
	}
	return inStore
}

// cacheGroup is one group of a cache as its events last told: window and pageTokens in tokens, 0: not told.
type cacheGroup struct {
	kind       string
	window     int
	pageTokens int
}

// learn takes sizes and kinds, as the last event tells them.
func (cache *Cache) learn(event BlockStored) {
	size := 0
	if 0 < event.BlockSize && event.BlockSize <= math.MaxUint32 {
		size = int(event.BlockSize)
	}
	group := uint32(event.Group)
	if group == prefixGroup {
		cache.pageTokens = orElse(size, cache.pageTokens)
		return
	}
	known, isKnown := cache.groups[group]
	if !isKnown && len(cache.groups) >= mostGroups {
		return
	}
	if kind, _ := event.More["kv_cache_spec_kind"].(string); kind != "" {
		known.kind = kind
	}
	known.window = orElse(tokensOf(event.More["kv_cache_spec_sliding_window"]), known.window)
	known.pageTokens = orElse(size, known.pageTokens)
	if cache.groups == nil {
		cache.groups = map[uint32]cacheGroup{}
	}
	cache.groups[group] = known
}

// tokensOf reads a number of tokens. No prompt is as long as the longest that it gives.
func tokensOf(value any) int {
	switch value := value.(type) {
	case int64:
		return int(max(math.MinInt32, min(value, math.MaxInt32)))
	case uint64:
		return int(min(value, math.MaxInt32))
	}
	return 0
}

func orElse(value, otherwise int) int {
	if value != 0 {
		return value
	}
	return otherwise
}

// leading says how many of the first blocks the cache holds on the device; there or on the host; there or on a disk; anywhere.
// Block i has hash (i+1)*stride-1; step is tokens from hash to hash, 0: a block.
func (cache *Cache) leading(hashes []uint64, stride, step int) [nowhere]int {
	held := cache.prefixTiers()
	var ends [nowhere]int
	longest, blocks := onDevice, len(hashes)/stride
	for block := 0; block < blocks && longest < nowhere; block++ {
		reach := held.nearest(hashes[(block+1)*stride-1])
		for ; longest < reach; longest++ {
			ends[longest] = block
		}
	}
	for ; longest < nowhere; longest++ {
		ends[longest] = blocks
	}
	if len(cache.groups) > 0 {
		for reach, prefix := range ends {
			ends[reach] = cache.usable(prefix, reach, hashes, step)
		}
	}
	return ends
}

// tiers are the blocks of a group by how far one reaches for them.
type tiers [nowhere][]map[uint64]int

func (cache *Cache) prefixTiers() (held tiers) {
	for place, copies := range cache.copies {
		if place.Group == prefixGroup {
			reach := reachOf(place.Medium)
			held[reach] = append(held[reach], copies)
		}
	}
	return held
}

func (held *tiers) nearest(hash uint64) int {
	for reach, tier := range held {
		for _, copies := range tier {
			if copies[hash] > 0 {
				return reach
			}
		}
	}
	return nowhere
}

// usable says how many of the first prefix blocks are of use: every group of the model has what it needs of them.
func (cache *Cache) usable(prefix, reach int, hashes []uint64, step int) int {
	step = max(1, orElse(step, cache.pageTokens))
	unit := max(1, cache.pageTokens/step)
	position := prefix * unit
	for position > 0 {
		least := position
		for number, group := range cache.groups {
			holds := func(end int) bool { return cache.holdsWithin(reach, number, hashes[end-1]) }
			size := max(1, orElse(group.pageTokens, cache.pageTokens)/step)
			least = min(least, group.usable(position, size, step, holds))
		}
		least -= least % unit
		if least == position {
			return position / unit
		}
		position = least
	}
	return 0
}

func (cache *Cache) holdsWithin(reach int, group uint32, hash uint64) bool {
	for place, copies := range cache.copies {
		if place.Group == group && reachOf(place.Medium) <= reach && copies[hash] > 0 {
			return true
		}
	}
	return false
}

// usable is the longest prefix up to position, in steps, that may be of use to the group, whose blocks have size steps. holds
// says whether the block that ends at a step is here.
func (group cacheGroup) usable(position, size, step int, holds func(end int) bool) int {
	switch group.kind {
	case "encoder_only_attention", "cross_attention":
		// What belongs to another sequence than the prompt's.
		return position
	}
	position -= position % size
	switch group.kind {
	case "mamba":
		if position == 0 || holds(position) {
			return position
		}
		return position - size
	case "sliding_window", "sliding_window_mla", "chunked_local_attention":
		if group.window == 0 {
			break
		}
		needed := 0
		if group.window > 1 {
			needed = (group.window-2)/(size*step) + 1
		}
		first := max(0, position-needed*size)
		for end := position; end > first; end -= size {
			if !holds(end) {
				return end - size
			}
		}
		return position
	}
	for end := size; end <= position; end += size {
		if !holds(end) {
			return end - size
		}
	}
	return position
}
