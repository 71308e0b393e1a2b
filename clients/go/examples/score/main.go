// Score follows the caches of engines in its own process, as a router does, and says who holds the beginning of a request:
//
//	go run . -registry HOST:PORT[,HOST:PORT...] [RANK_HOST:PORT ...]
//
// Each line of its input is a kvgrpc.Question in JSON, {"Hashes": [1, 2]}, and each line of its output an answer.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"

	kvgrpc "kvgrpc.dev/go"
)

// What a line of a prompt of 65,536 blocks takes.
const longestLine = 4 << 20

type answer struct {
	Scores      []json.RawMessage
	Sources     []string
	NotFollowed []string
	Error       string
}

func main() {
	registry := flag.String("registry", "", "replicas of a registry, with commas between them")
	flag.Parse()
	options := kvgrpc.IndexOptions{Sources: flag.Args(), Dial: dial}
	if *registry != "" {
		options.Registries = strings.Split(*registry, ",")
	}
	index, err := kvgrpc.NewPrefixIndex(options)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	defer index.Close()
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, longestLine)
	for lines.Scan() {
		written, _ := json.Marshal(ask(index, lines.Bytes()))
		fmt.Println(string(written))
	}
}

func ask(index *kvgrpc.PrefixIndex, line []byte) (told answer) {
	var question kvgrpc.Question
	if err := json.Unmarshal(line, &question); err != nil {
		told.Error = err.Error()
		return told
	}
	scores, err := index.Score(question)
	if err != nil {
		told.Error = err.Error()
	}
	for _, score := range scores {
		written, _ := protojson.Marshal(score)
		told.Scores = append(told.Scores, written)
	}
	for _, source := range index.Sources() {
		known := source.Freshness
		line := fmt.Sprintf("%s dp%d %s %s %d", source.Engine, source.DP, known.State, known.LogId, known.NextSequence)
		told.Sources = append(told.Sources, line)
	}
	told.NotFollowed = index.NotFollowed()
	return told
}

func dial(address string) (*kvgrpc.Connection, error) {
	return kvgrpc.Dial(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
}
