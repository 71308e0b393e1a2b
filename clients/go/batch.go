// Package kvgrpc is what generated code cannot give: event batches as typed values, a Watch that goes on over breaks and
// restarts, the contents of a cache with their digest, and failures by their reason.
package kvgrpc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// ErrNotABatch says that a payload is no batch of KV-cache events at all.
var ErrNotABatch = errors.New("not a batch of KV-cache events")

// What is above are milliseconds: as seconds they would lie in the year 5138 or later.
const latestSeconds = 1e11

// Batch is one payload of PUB, or of a Watch. docs/events.md has the layout.
type Batch struct {
	// Time is Unix seconds of the publisher, for people: order comes from the sequence.
	Time   float64
	Events []Event
	// Rank is nil where the writer named none.
	Rank *int64
}

// Event is a BlockStored, BlockRemoved, AllBlocksCleared, TierBlocksCleared or UnknownEvent.
type Event interface{ event() }

// BlockStored says that blocks came into a tier, each the child of the one before it.
type BlockStored struct {
	Hashes []BlockHash
	// Parent is the block before the first; nil: there is none.
	Parent *BlockHash
	// TokenIDs are those of all blocks, BlockSize each: numbers, or pairs of them where the engine drafts by bigrams.
	TokenIDs  []any
	BlockSize int64
	// Medium is the engine's name of the tier ("GPU", "CPU_PINNED", ...); empty: the device's.
	Medium string
	// Group is the cache group; 0 where the engine has one.
	Group int64
	// More is what else the event said, by its name on the wire: lora_name, extra_keys, cache_salt, ...
	More map[string]any
}

// BlockRemoved says that one copy of each block left a tier.
type BlockRemoved struct {
	Hashes []BlockHash
	Medium string
	Group  int64
	More   map[string]any
}

// AllBlocksCleared says that nothing is cached any more, in any tier.
type AllBlocksCleared struct{}

// TierBlocksCleared says that all blocks, of every group, left the tier that the engine calls Medium. Ownership names a secondary
// tier, where the engine does; nobody counts blocks by it, so those of the others go too.
type TierBlocksCleared struct {
	Medium    string
	Ownership string
}

// UnknownEvent is an event of a kind that this version does not know, or that it cannot read. The other events of its
// batch count all the same. It may have been a removal, unless it calls itself a BlockStored: Cache.Doubtful says so.
type UnknownEvent struct {
	Name string
	// Raw is the event as it was written, in msgpack.
	Raw []byte
}

func (BlockStored) event()       {}
func (BlockRemoved) event()      {}
func (AllBlocksCleared) event()  {}
func (TierBlocksCleared) event() {}
func (UnknownEvent) event()      {}

// BlockHash is opaque: a 64-bit number, or a digest.
type BlockHash struct {
	Value  uint64
	Digest []byte
}

// Key identifies a block in 64 bits: signed and unsigned numbers are the same, of a digest the last 8 bytes count.
func (hash BlockHash) Key() uint64 {
	if hash.Digest == nil {
		return hash.Value
	}
	var last [8]byte
	copy(last[max(0, 8-len(hash.Digest)):], hash.Digest[max(0, len(hash.Digest)-8):])
	return binary.BigEndian.Uint64(last[:])
}

// Names of the fields of arrays behind the event's name, oldest first; absent ones at the end are left out.
var (
	storedFields = []string{
		"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
		"group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
	}
	removedFields     = []string{"block_hashes", "medium", "group_idx", "locality"}
	tierClearedFields = []string{"medium", "ownership"}
)

// DecodeBatch reads a payload in any encoding and dialect. The error is ErrNotABatch; an event that cannot be read is an
// UnknownEvent.
func DecodeBatch(payload []byte) (Batch, error) {
	reader := reader{rest: payload}
	batch, err := reader.batch()
	if err != nil || len(reader.rest) > 0 {
		return Batch{}, fmt.Errorf("%w: [time, [event, ...], rank] was expected", ErrNotABatch)
	}
	return batch, nil
}

func (reader *reader) batch() (Batch, error) {
	parts, err := reader.listHeader()
	if err != nil || parts < 2 {
		return Batch{}, ErrNotABatch
	}
	written, err := reader.value(0)
	seconds, isTime := number(written)
	if err != nil || !isTime {
		return Batch{}, ErrNotABatch
	}
	if seconds > latestSeconds {
		seconds /= 1000
	}
	batch := Batch{Time: seconds}
	count, err := reader.listHeader()
	if err != nil {
		return Batch{}, err
	}
	for range count {
		raw, err := reader.skip()
		if err != nil {
			return Batch{}, err
		}
		batch.Events = append(batch.Events, decodeEvent(raw))
	}
	for part := uint64(2); part < parts; part++ {
		raw, err := reader.skip()
		if err != nil {
			return Batch{}, err
		}
		if part > 2 {
			continue
		}
		value, _ := decodeMsgpack(raw)
		if rank, isNumber := value.(int64); isNumber {
			batch.Rank = &rank
		}
	}
	return batch, nil
}

func decodeEvent(raw []byte) Event {
	value, err := decodeMsgpack(raw)
	if err != nil {
		return UnknownEvent{Raw: raw}
	}
	name := ""
	var fields map[string]any
	switch written := value.(type) {
	case []any:
		if len(written) > 0 {
			name, _ = written[0].(string)
			fields, err = byName(name, written[1:])
		}
	case map[string]any:
		name, _ = written["type"].(string)
		delete(written, "type")
		fields = written
	}
	if err == nil {
		if event, err := fromFields(name, fields); err == nil {
			return event
		}
	}
	return UnknownEvent{Name: name, Raw: raw}
}

func byName(name string, values []any) (map[string]any, error) {
	names, needed := []string(nil), 0
	switch name {
	case "BlockStored":
		names, needed = storedFields, 4
	case "BlockRemoved":
		names, needed = removedFields, 1
	case "TierBlocksCleared":
		names, needed = tierClearedFields, 1
	}
	if len(values) < needed {
		return nil, errField
	}
	// Dynamo has a list of images, or nil in its place, before the group.
	if name == "BlockStored" && len(values) > 8 {
		_, isList := values[8].([]any)
		if isList || values[8] == nil && len(values) > 9 && isInteger(values[9]) {
			values = slices.Delete(values, 8, 9)
		}
	}
	fields := map[string]any{}
	for position, value := range values[:min(len(values), len(names))] {
		// SGLang's arrays once had a map of more fields where vLLM's have the name of the adapter.
		if metadata, isMap := value.(map[string]any); isMap && names[position] == "lora_name" {
			if salt, isText := metadata["cache_salt"].(string); isText {
				fields["cache_salt"] = salt
			}
		} else {
			fields[names[position]] = value
		}
	}
	return fields, nil
}

func fromFields(name string, fields map[string]any) (Event, error) {
	types := removedTypes
	switch name {
	case "AllBlocksCleared":
		return AllBlocksCleared{}, nil
	case "TierBlocksCleared":
		return tierCleared(fields)
	case "BlockStored":
		types = storedTypes
	case "BlockRemoved":
	default:
		return nil, errField
	}
	listed, isList := fields["block_hashes"].([]any)
	if err := checkFields(fields, types); err != nil || !isList {
		return nil, errField
	}
	hashes := make([]BlockHash, len(listed))
	for index, value := range listed {
		hash, isHash := hashOf(value)
		if !isHash {
			return nil, errField
		}
		hashes[index] = hash
	}
	medium, _ := fields["medium"].(string)
	group, _ := fields["group_idx"].(int64)
	parent, hasParent := hashOf(fields["parent_block_hash"])
	tokens, _ := fields["token_ids"].([]any)
	size, _ := fields["block_size"].(int64)
	for key, value := range fields {
		if value == nil || key == "block_hashes" || key == "medium" || key == "group_idx" {
			delete(fields, key)
		}
	}
	if name == "BlockRemoved" {
		return BlockRemoved{Hashes: hashes, Medium: medium, Group: group, More: fields}, nil
	}
	for _, key := range []string{"parent_block_hash", "token_ids", "block_size"} {
		delete(fields, key)
	}
	stored := BlockStored{Hashes: hashes, TokenIDs: tokens, BlockSize: size, Medium: medium, Group: group, More: fields}
	if hasParent {
		stored.Parent = &parent
	}
	return stored, nil
}

func hashOf(value any) (BlockHash, bool) {
	switch hash := value.(type) {
	case int64:
		return BlockHash{Value: uint64(hash)}, true
	case uint64:
		return BlockHash{Value: hash}, true
	case []byte:
		return BlockHash{Digest: hash}, true
	}
	return BlockHash{}, false
}

func tierCleared(fields map[string]any) (Event, error) {
	medium, isNamed := fields["medium"].(string)
	ownership, isText := fields["ownership"].(string)
	if !isNamed || !isText && fields["ownership"] != nil {
		return nil, errField
	}
	return TierBlocksCleared{Medium: medium, Ownership: ownership}, nil
}

func number(value any) (float64, bool) {
	switch written := value.(type) {
	case float64:
		return written, true
	case int64:
		return float64(written), true
	case uint64:
		return float64(written), true
	}
	return 0, false
}
