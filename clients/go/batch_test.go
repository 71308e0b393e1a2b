package kvgrpc

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// The golden batches that every implementation reads alike.
const golden = "../../tests/conformance/events"

type goldenCase struct {
	Time   json.Number      `json:"ts"`
	Rank   *json.Number     `json:"rank"`
	Events []map[string]any `json:"events"`
}

func TestGoldenBatchesReadAsTheirCases(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(golden, "cases.json"))
	if err != nil {
		t.Fatal(err)
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	cases := map[string]goldenCase{}
	if err := decoder.Decode(&cases); err != nil || len(cases) == 0 {
		t.Fatal(len(cases), err)
	}
	for name, expected := range cases {
		t.Run(name, func(t *testing.T) {
			payload, err := os.ReadFile(filepath.Join(golden, name+".msgpack"))
			if err != nil {
				t.Fatal(err)
			}
			batch, err := DecodeBatch(payload)
			if err != nil {
				t.Fatal(err)
			}
			seconds, _ := expected.Time.Float64()
			if batch.Time != seconds {
				t.Errorf("time %v, not %v", batch.Time, seconds)
			}
			if (batch.Rank == nil) != (expected.Rank == nil) || batch.Rank != nil && fmt.Sprint(*batch.Rank) != expected.Rank.String() {
				t.Errorf("rank %v, not %v", batch.Rank, expected.Rank)
			}
			if len(batch.Events) != len(expected.Events) {
				t.Fatalf("%d events, not %d", len(batch.Events), len(expected.Events))
			}
			for index, event := range batch.Events {
				if read, wanted := asCase(event), comparable(expected.Events[index]); !reflect.DeepEqual(read, wanted) {
					t.Errorf("event %d:\n%v\nnot\n%v", index, read, wanted)
				}
			}
		})
	}
}

func TestWhatIsNoBatchIsRefused(t *testing.T) {
	for _, payload := range [][]byte{nil, {0xc1, 0xff}, {0x01}, {0x92, 0x01, 0x01}, {0xdd, 0xff, 0xff, 0xff, 0xff}} {
		if _, err := DecodeBatch(payload); !errors.Is(err, ErrNotABatch) {
			t.Errorf("%x: %v", payload, err)
		}
	}
}

func FuzzDecodeBatch(f *testing.F) {
	files, _ := filepath.Glob(filepath.Join(golden, "*.msgpack"))
	for _, file := range files {
		payload, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(payload)
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		if _, err := DecodeBatch(payload); err != nil && !errors.Is(err, ErrNotABatch) {
			t.Error(err)
		}
	})
}

// An event in the words of cases.json.
func asCase(event Event) map[string]any {
	switch event := event.(type) {
	case AllBlocksCleared:
		return map[string]any{"type": "AllBlocksCleared"}
	case TierBlocksCleared:
		return map[string]any{"type": "TierBlocksCleared", "medium": event.Medium}
	case UnknownEvent:
		return map[string]any{"type": "UnknownEvent", "name": event.Name}
	case BlockRemoved:
		return withFields(map[string]any{"type": "BlockRemoved"}, event.Hashes, event.Medium, event.Group, event.More)
	case BlockStored:
		written := map[string]any{"type": "BlockStored", "token_ids": event.TokenIDs, "block_size": event.BlockSize}
		if event.Parent != nil {
			written["parent_block_hash"] = hashText(*event.Parent)
		}
		return withFields(written, event.Hashes, event.Medium, event.Group, event.More)
	}
	return nil
}

func withFields(written map[string]any, hashes []BlockHash, medium string, group int64, more map[string]any) map[string]any {
	texts := []any{}
	for _, hash := range hashes {
		texts = append(texts, hashText(hash))
	}
	written["block_hashes"] = texts
	if medium != "" {
		written["medium"] = medium
	}
	if group != 0 {
		written["group_idx"] = group
	}
	for key, value := range more {
		written[key] = value
	}
	return comparable(written)
}

func hashText(hash BlockHash) string {
	if hash.Digest != nil {
		return "hex:" + hex.EncodeToString(hash.Digest)
	}
	return fmt.Sprint(hash.Value)
}

// Without absent fields, with all numbers as text (hashes as unsigned), unknown keys beside the known ones.
func comparable(event map[string]any) map[string]any {
	flat := map[string]any{}
	for key, value := range event {
		unknown, isMap := value.(map[string]any)
		switch {
		case value == nil || key == "raw" || key == "group_idx" && fmt.Sprint(value) == "0":
		case key == "unknown_keys" && isMap:
			for name, field := range unknown {
				if field != nil {
					flat[name] = plain(field)
				}
			}
		case key == "block_hashes" || key == "parent_block_hash":
			flat[key] = unsigned(value)
		default:
			flat[key] = plain(value)
		}
	}
	return flat
}

func unsigned(value any) any {
	if list, isList := value.([]any); isList {
		texts := []any{}
		for _, one := range list {
			texts = append(texts, unsigned(one))
		}
		return texts
	}
	var signed int64
	text := fmt.Sprint(value)
	if _, err := fmt.Sscan(text, &signed); err == nil && signed < 0 {
		return fmt.Sprint(uint64(signed))
	}
	return text
}

func plain(value any) any {
	switch written := value.(type) {
	case []any:
		texts := []any{}
		for _, one := range written {
			texts = append(texts, plain(one))
		}
		return texts
	case []byte:
		return "hex:" + hex.EncodeToString(written)
	case nil:
		return nil
	}
	return fmt.Sprint(value)
}
