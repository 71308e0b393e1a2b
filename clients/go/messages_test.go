package kvgrpc

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// Golden messages as bytes and as JSON, both ways: tests/conformance/messages.
func TestBytesAndJSONOfAMessageAreMadeOfEachOther(t *testing.T) {
	files, err := filepath.Glob("../../tests/conformance/messages/*.binpb")
	if err != nil || len(files) < 10 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		name, _, _ := strings.Cut(filepath.Base(file), ".")
		t.Run(filepath.Base(file), func(t *testing.T) {
			kind, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName("kvgrpc.v1." + name))
			if err != nil {
				t.Fatal(err)
			}
			ofBytes, ofJSON := kind.New().Interface(), kind.New().Interface()
			told := read(t, strings.TrimSuffix(file, "binpb")+"json")
			if err := proto.Unmarshal(read(t, file), ofBytes); err != nil {
				t.Fatal(err)
			}
			if err := protojson.Unmarshal(told, ofJSON); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(encoded(t, ofBytes), encoded(t, ofJSON)) {
				t.Fatalf("%v is not %v", ofBytes, ofJSON)
			}
			written, err := protojson.Marshal(ofBytes)
			if err != nil || !reflect.DeepEqual(parsed(t, written), parsed(t, told)) {
				t.Fatalf("%s is not %s: %v", written, told, err)
			}
		})
	}
}

func read(t *testing.T, file string) []byte {
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func encoded(t *testing.T, message proto.Message) []byte {
	written, err := proto.MarshalOptions{Deterministic: true}.Marshal(message)
	if err != nil {
		t.Fatal(err)
	}
	return written
}

func parsed(t *testing.T, text []byte) (value any) {
	if err := json.Unmarshal(text, &value); err != nil {
		t.Fatal(err)
	}
	return value
}
