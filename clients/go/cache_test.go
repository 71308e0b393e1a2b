package kvgrpc

import (
	"encoding/hex"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"testing"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

func numbers(values ...uint64) []BlockHash {
	hashes := make([]BlockHash, len(values))
	for index, value := range values {
		hashes[index] = BlockHash{Value: value}
	}
	return hashes
}

func TestABlockIsThereUntilItsLastCopyGoes(t *testing.T) {
	var cache Cache
	device := Place{Medium: "GPU"}
	cache.Apply([]Event{BlockStored{Hashes: numbers(1, 1, 2)}, BlockRemoved{Hashes: numbers(1, 3), Medium: "gpu"}})
	if !cache.Holds(device, BlockHash{Value: 1}) || cache.Blocks()[device] != 2 {
		t.Error(cache.Blocks())
	}
	cache.Apply([]Event{BlockRemoved{Hashes: numbers(1)}})
	if cache.Holds(device, BlockHash{Value: 1}) {
		t.Error("its last copy went")
	}
	cache.Apply([]Event{AllBlocksCleared{}})
	if len(cache.Blocks()) != 0 {
		t.Error(cache.Blocks())
	}
}

// From kvgrpc/events/log/digest.py: hashes 1, 2^64 - 2 on GPU and the digest of 32 bytes 0 to 31 in group 1 of CPU.
func TestTheDigestIsThatOfThePublisher(t *testing.T) {
	var cache Cache
	digest := make([]byte, 32)
	for index := range digest {
		digest[index] = byte(index)
	}
	cache.Apply([]Event{
		BlockStored{Hashes: numbers(1, 1<<64-2, 5)},
		BlockStored{Hashes: []BlockHash{{Digest: digest}}, Medium: "cpu", Group: 1},
		BlockRemoved{Hashes: numbers(5)},
	})
	state := &kvgrpcv1.StateDigest{Tiers: []*kvgrpcv1.TierDigest{
		{Medium: "CPU", Group: 1, Blocks: 1, MixedHashes: 0xc1950c7bba2b5c3b},
		{Medium: "GPU", Blocks: 2, MixedHashes: 0x842a6c7cc2f704e2},
	}}
	if !cache.Is(state) {
		t.Errorf("%v is not %v", cache.digest(), state)
	}
	cache.Apply([]Event{BlockStored{Hashes: numbers(6)}})
	if cache.Is(state) {
		t.Error("one more block is another state")
	}
}

// What one reader passes over and another one takes, their states would differ in for ever.
func TestTiersAndGroupsBeyondTheBoundArePassedOverAsByThePublisher(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(golden, "places.json"))
	if err != nil {
		t.Fatal(err)
	}
	var log struct {
		Payloads []string `json:"payloads"`
		States   []struct {
			Places, Blocks int
			MixedHashes    uint64 `json:"mixed_hashes,string"`
		} `json:"states"`
	}
	if err := json.Unmarshal(text, &log); err != nil || len(log.States) != len(log.Payloads) || len(log.States) < 9 {
		t.Fatal(len(log.States), err)
	}
	var cache Cache
	for index, digits := range log.Payloads {
		payload, _ := hex.DecodeString(digits)
		batch, err := DecodeBatch(payload)
		if err != nil {
			t.Fatal(err)
		}
		cache.Apply(batch.Events)
		blocks, mixed := 0, uint64(0)
		for _, tier := range cache.digest() {
			blocks += int(tier.Blocks)
			mixed += tier.MixedHashes
		}
		if wanted := log.States[index]; len(cache.copies) != wanted.Places || blocks != wanted.Blocks || mixed != wanted.MixedHashes {
			t.Errorf("batch %d: %d places, %d blocks, %d, and not %v", index, len(cache.copies), blocks, mixed, wanted)
		}
	}
}

func TestAClearOfOneTierAndWhatCannotBeReadLeaveWhatEveryReaderKnows(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(golden, "clears.json"))
	if err != nil {
		t.Fatal(err)
	}
	var steps []struct {
		Name, Payload string
		Held          []struct {
			Medium string
			Group  uint32
			Blocks []uint64
		}
		Doubtful bool
	}
	if err := json.Unmarshal(text, &steps); err != nil || len(steps) < 10 {
		t.Fatal(len(steps), err)
	}
	var cache Cache
	cache.Hear(Reset{"a", true})
	for index, step := range steps {
		payload, _ := hex.DecodeString(step.Payload)
		cache.hearAll(t, uint64(index), [][]byte{payload})
		held := map[Place]int{}
		for _, place := range step.Held {
			held[Place{place.Medium, place.Group}] = len(place.Blocks)
			for _, block := range place.Blocks {
				if !cache.Holds(Place{place.Medium, place.Group}, BlockHash{Value: block}) {
					t.Errorf("%s: %d is gone", step.Name, block)
				}
			}
		}
		if !maps.Equal(held, cache.Blocks()) || cache.Doubtful() != step.Doubtful {
			t.Errorf("%s: %v, doubtful %v", step.Name, cache.Blocks(), cache.Doubtful())
		}
	}
}

func TestADigestOfAPublisherThatCanReadItEndsADoubt(t *testing.T) {
	var cache Cache
	cache.Hear(Reset{"a", true})
	cache.Hear(Events{NextSequence: 1, Complete: true})
	cache.Hear(Events{NextSequence: 2, Events: []Event{UnknownEvent{Name: "BlockMoved"}}, Complete: true})
	for _, step := range []struct {
		state    *kvgrpcv1.StateDigest
		verdict  Verdict
		doubtful bool
	}{
		{&kvgrpcv1.StateDigest{NextSequence: 2, Doubtful: true}, Equal, true},
		{&kvgrpcv1.StateDigest{NextSequence: 2, Kind: 99}, Unknown, true},
		{&kvgrpcv1.StateDigest{NextSequence: 0}, Unknown, true},
		{&kvgrpcv1.StateDigest{NextSequence: 2, Kind: kvgrpcv1.DigestKind_DIGEST_KIND_MIX64_SUM}, Equal, false},
	} {
		if verdict := cache.Hear(Current{State: step.state}); verdict != step.verdict || cache.Doubtful() != step.doubtful {
			t.Errorf("%v: %v, doubtful %v", step.state, verdict, cache.Doubtful())
		}
	}
	// What its publisher could not read was read here.
	of := &kvgrpcv1.StateDigest{NextSequence: 2, Doubtful: true, Tiers: []*kvgrpcv1.TierDigest{{Medium: "GPU", Blocks: 1}}}
	if verdict := cache.Compare(of); verdict != Unknown {
		t.Error(verdict)
	}
	// A snapshot of a publisher that cannot read it either is as doubtful as that.
	cache.Hear(Reset{"a", true})
	cache.Hear(Events{NextSequence: 3, Complete: true, State: &kvgrpcv1.StateDigest{NextSequence: 3, Doubtful: true}})
	if !cache.Doubtful() {
		t.Error("a doubtful snapshot")
	}
}
