// llm-d's own reader of KV events: a payload in hexadecimal on each line of its input, what it makes of it on a line each. The
// argument is the engine whose adapter reads.
package main

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"strings"

	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents"
	"github.com/llm-d/llm-d-kv-cache/pkg/kvevents/engineadapter"
)

func main() {
	adapter, err := engineadapter.NewAdapter(os.Args[1])
	if err != nil {
		panic(err)
	}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		payload, err := hex.DecodeString(lines.Text())
		if err != nil {
			panic(err)
		}
		_, _, batch, err := adapter.ParseMessage(&kvevents.RawMessage{Topic: "kv@pod@model", Payload: payload})
		if err != nil {
			fmt.Println("refused:", strings.ReplaceAll(err.Error(), "\n", " "))
			continue
		}
		told := []string{}
		for _, event := range batch.Events {
			told = append(told, spelled(event))
		}
		fmt.Println(strings.Join(told, " "))
	}
}

func spelled(event kvevents.GenericEvent) string {
	switch known := event.(type) {
	case *kvevents.BlockStoredEvent:
		return "stored:" + joined(known.BlockHashes) + ":" + place(known.DeviceTier)
	case *kvevents.BlockRemovedEvent:
		return "removed:" + joined(known.BlockHashes) + ":" + place(known.DeviceTier)
	case *kvevents.AllBlocksClearedEvent:
		return "cleared"
	}
	return string(event.Type())
}

func place(tier string) string {
	if tier == "" {
		return "-"
	}
	return tier
}

func joined(hashes []uint64) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(hashes), " ", ","), "[]")
}
