package kvgrpc

import (
	"encoding/json"
	"os"
	"testing"
	"time"
)

func TestTokensAreThoseOfTheVectors(t *testing.T) {
	raw, err := os.ReadFile("../../tests/conformance/tokens/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Secret, Address, Target, Authorization string
		Time                                   int64
	}
	if err := json.Unmarshal(raw, &vectors); err != nil || len(vectors) == 0 {
		t.Fatal(len(vectors), err)
	}
	for _, vector := range vectors {
		target, err := Target(vector.Address)
		if err != nil || target != vector.Target {
			t.Errorf("%s: %q (%v), not %q", vector.Address, target, err, vector.Target)
		}
		if made := Authorization(vector.Secret, target, time.Unix(vector.Time, 0)); made != vector.Authorization {
			t.Errorf("%s: %s, not %s", vector.Address, made, vector.Authorization)
		}
	}
}

func TestAProofThatCannotBeIsRefused(t *testing.T) {
	for _, each := range [][2]string{{"short", "127.0.0.1:1"}, {"long-enough-a-secret", "nowhere"}, {"long-enough-a-secret", "a:99999"}} {
		if _, err := Proof(each[0], each[1], true); err == nil {
			t.Error(each)
		}
	}
	made, err := Proof("long-enough-a-secret", "127.0.0.1:1", false)
	if err != nil || !made.RequireTransportSecurity() {
		t.Error("a token must not travel in plaintext unasked", err)
	}
}
