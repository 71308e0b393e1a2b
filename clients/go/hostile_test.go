package kvgrpc

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

type hostileCase struct {
	// Each hex digits and how often they come.
	Parts [][2]any `json:"parts"`
	// The kinds of the events that are read; nil: it is no batch.
	Events []string `json:"events"`
}

func (hostile hostileCase) payload(t *testing.T) []byte {
	payload := []byte{}
	for _, part := range hostile.Parts {
		piece, err := hex.DecodeString(part[0].(string))
		if err != nil {
			t.Fatal(err)
		}
		for range int(part[1].(float64)) {
			payload = append(payload, piece...)
		}
	}
	return payload
}

// What one reader takes for another event than the publisher did, their states would differ in for ever.
func TestHostilePayloadsAreReadAsThePublisherReadsThem(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(golden, "hostile.json"))
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string]hostileCase{}
	if err := json.Unmarshal(text, &cases); err != nil || len(cases) < 100 {
		t.Fatal(len(cases), err)
	}
	for name, hostile := range cases {
		batch, err := DecodeBatch(hostile.payload(t))
		if hostile.Events == nil {
			if !errors.Is(err, ErrNotABatch) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		kinds := []string{}
		for _, event := range batch.Events {
			kinds = append(kinds, fmt.Sprintf("%T", event)[len("kvgrpc."):])
		}
		if err != nil || fmt.Sprint(kinds) != fmt.Sprint(hostile.Events) {
			t.Errorf("%s: %v, %v and not %v", name, err, kinds, hostile.Events)
		}
	}
}
