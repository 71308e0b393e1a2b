package kvgrpc

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

type tierText struct {
	Medium      string `json:"medium"`
	Group       uint32 `json:"group"`
	Blocks      uint64 `json:"blocks"`
	MixedHashes uint64 `json:"mixed_hashes,string"`
}

// The log that every implementation follows, and the publisher's digests at its checkpoints.
func goldenLog(t *testing.T) (payloads [][]byte, digests map[uint64]*kvgrpcv1.StateDigest) {
	text, err := os.ReadFile(filepath.Join(golden, "checkpoints.json"))
	if err != nil {
		t.Fatal(err)
	}
	var written struct {
		Payloads []string              `json:"payloads"`
		Digests  map[string][]tierText `json:"digests"`
	}
	if err := json.Unmarshal(text, &written); err != nil || len(written.Digests) < 4 {
		t.Fatal(len(written.Digests), err)
	}
	for _, digits := range written.Payloads {
		payload, err := hex.DecodeString(digits)
		if err != nil {
			t.Fatal(err)
		}
		payloads = append(payloads, payload)
	}
	digests = map[uint64]*kvgrpcv1.StateDigest{}
	for name, tiers := range written.Digests {
		next, _ := strconv.ParseUint(name, 10, 64)
		digests[next] = &kvgrpcv1.StateDigest{NextSequence: next}
		for _, tier := range tiers {
			digests[next].Tiers = append(digests[next].Tiers, &kvgrpcv1.TierDigest{
				Medium: tier.Medium, Group: tier.Group, Blocks: tier.Blocks, MixedHashes: tier.MixedHashes,
			})
		}
	}
	return payloads, digests
}

func (cache *Cache) hearAll(t *testing.T, first uint64, payloads [][]byte) {
	for index, payload := range payloads {
		batch, err := DecodeBatch(payload)
		if err != nil {
			t.Fatal(err)
		}
		cache.Hear(Events{NextSequence: first + uint64(index) + 1, Events: batch.Events, Complete: true})
	}
}

func TestADigestOfThePastIsComparedWithItsCheckpoint(t *testing.T) {
	payloads, digests := goldenLog(t)
	var cache Cache
	cache.Hear(Reset{"a", true})
	cache.hearAll(t, 0, payloads)
	for next, digest := range digests {
		if verdict := cache.Hear(Current{State: digest}); verdict != Equal {
			t.Errorf("at %d: %v", next, verdict)
		}
		digest.Tiers = nil
		if verdict := cache.Compare(digest); verdict != Different {
			t.Errorf("at %d, of another state: %v", next, verdict)
		}
	}
	for _, next := range []uint64{0, 63, 65, 199, 256} {
		if verdict := cache.Compare(&kvgrpcv1.StateDigest{NextSequence: next}); verdict != Unknown {
			t.Errorf("at %d nobody knows: %v", next, verdict)
		}
	}
}

func TestOnlyTheLastCheckpointsAreKept(t *testing.T) {
	var cache Cache
	cache.Hear(Reset{"a", true})
	for next := uint64(1); next <= 100*checkpointBatches; next++ {
		cache.Hear(Events{NextSequence: next, Complete: true})
	}
	if len(cache.past) != checkpoints {
		t.Error(len(cache.past))
	}
	if _, kept := cache.past[37*checkpointBatches]; !kept {
		t.Error("the last 64 are kept")
	}
	cache.Hear(Reset{"b", true})
	if verdict := cache.Compare(&kvgrpcv1.StateDigest{NextSequence: 64 * 64}); verdict != Unknown {
		t.Error("those of another log are void:", verdict)
	}
}

func TestWhatWasNotSeenFromItsBeginningIsComparedOnceItWasCleared(t *testing.T) {
	var cache Cache
	cache.Hear(Reset{"a", false})
	cache.Hear(Events{NextSequence: 9, Complete: true})
	if verdict := cache.Compare(&kvgrpcv1.StateDigest{NextSequence: 9}); verdict != Unknown {
		t.Error(verdict)
	}
	cache.Hear(Events{NextSequence: 10, Events: []Event{AllBlocksCleared{}}, Complete: true})
	if verdict := cache.Compare(&kvgrpcv1.StateDigest{NextSequence: 10}); verdict != Equal {
		t.Error(verdict)
	}
}

func heartbeat(next uint64, tiers ...*kvgrpcv1.TierDigest) *kvgrpcv1.WatchResponse {
	state := &kvgrpcv1.StateDigest{NextSequence: next, Tiers: tiers}
	return &kvgrpcv1.WatchResponse{Kind: &kvgrpcv1.WatchResponse_Heartbeat{
		Heartbeat: &kvgrpcv1.WatchHeartbeat{NextSequence: next, State: state},
	}}
}

func TestAFollowerWhoseDigestDiffersBeginsAgainWithASnapshot(t *testing.T) {
	server := &script{calls: calls{
		saying(nil, begin("a", 1), snapshot(1, 0, true), heartbeat(1, &kvgrpcv1.TierDigest{Medium: "GPU", Blocks: 1, MixedHashes: 5})),
		saying(nil, begin("a", 1), snapshot(1, 0, true), heartbeat(1)),
	}}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var cache Cache
	resets := 0
	for item := range Follow(ctx, server.serve(t), Stream{Engine: "e"}, &cache) {
		if _, isReset := item.(Reset); isReset {
			resets++
		}
		if current, isCurrent := item.(Current); isCurrent && cache.Compare(current.State) == Equal {
			break
		}
	}
	if resets != 2 || server.requests[1].Mode != kvgrpcv1.WatchMode_WATCH_MODE_SNAPSHOT {
		t.Error(resets, server.requests)
	}
}
