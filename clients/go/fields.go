package kvgrpc

import (
	"errors"
	"math"
	"slices"
)

var errField = errors.New("a field that cannot be read")

// What the known fields hold, as docs/events.md has it; each may be nil. An event with anything else in one of them cannot be
// read: every reader must agree on that, or their states differ.
var (
	storedTypes = map[string]func(any) bool{
		"parent_block_hash":            isHash,
		"token_ids":                    isListOf(isToken),
		"block_size":                   isInteger,
		"lora_id":                      isInteger,
		"medium":                       isText,
		"lora_name":                    isText,
		"cache_salt":                   isText,
		"extra_keys":                   isListOf(isAnything),
		"group_idx":                    isGroup,
		"kv_cache_spec_kind":           isText,
		"kv_cache_spec_sliding_window": isInteger,
		"locality":                     isText,
		"ownership":                    isText,
		"session_id":                   isText,
		"lookahead_token_ids":          isListOf(isListOf(isInteger)),
	}
	removedTypes = map[string]func(any) bool{
		"medium": isText, "group_idx": isGroup, "locality": isText, "ownership": isText,
	}
)

func checkFields(fields map[string]any, types map[string]func(any) bool) error {
	for name, value := range fields {
		fits := types[name]
		if value != nil && fits != nil && !fits(value) {
			return errField
		}
	}
	return nil
}

func isAnything(any) bool { return true }

func isText(value any) bool {
	_, fits := value.(string)
	return fits
}

func isInteger(value any) bool {
	switch value.(type) {
	case int64, uint64:
		return true
	}
	return false
}

func isHash(value any) bool {
	_, fits := hashOf(value)
	return fits
}

// A cache group is what a uint32 holds.
func isGroup(value any) bool {
	number, fits := value.(int64)
	return fits && number >= 0 && number <= math.MaxUint32
}

func isToken(value any) bool {
	return isInteger(value) || isText(value) || isListOf(isInteger)(value)
}

func isListOf(fits func(any) bool) func(any) bool {
	return func(value any) bool {
		list, isList := value.([]any)
		return isList && !slices.ContainsFunc(list, func(one any) bool { return !fits(one) })
	}
}
