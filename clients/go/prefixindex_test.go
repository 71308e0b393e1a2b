package kvgrpc

import (
	"errors"
	"testing"

	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

func TestOptionsThatCannotWorkAreRefusedAtOnce(t *testing.T) {
	dial := func(string) (*Connection, error) { return nil, errors.New("not dialled here") }
	for _, options := range []IndexOptions{
		{Registries: []string{"a:1"}}, {Dial: dial}, {Dial: dial, Sources: []string{""}}, {Dial: dial, Registries: []string{""}},
	} {
		if _, err := NewPrefixIndex(options); err == nil {
			t.Errorf("%+v was taken", options)
		}
	}
}

// A row says of a rank of an engine that it serves events at an address.
func rowOf(dp, tp uint32, epoch uint64, address string) *kvgrpcv1.RankRow {
	return &kvgrpcv1.RankRow{
		Rank:         &kvgrpcv1.RankRef{Rank: &kvgrpcv1.RankId{Engine: "e", Dp: dp, Tp: tp}, Epoch: epoch},
		Endpoints:    &kvgrpcv1.Endpoints{Grpc: address},
		ServesEvents: true,
	}
}

func changed(ranks uint32, rows ...*kvgrpcv1.RankRow) *kvgrpcv1.WatchEnginesResponse {
	engine := &kvgrpcv1.Engine{Name: "e", RegisteredRanks: ranks, Rows: rows}
	return &kvgrpcv1.WatchEnginesResponse{Changes: []*kvgrpcv1.EngineChange{{Engine: engine}}}
}

func TestLabelsLeaveOutCachesWhoseRankLacksOne(t *testing.T) {
	index := &PrefixIndex{followers: map[cacheKey]*followed{}}
	for engine, labels := range map[string]map[string]string{"A": {"zone": "x", "rack": "1"}, "B": {"zone": "y"}, "C": nil} {
		key := cacheKey{engine, 0}
		index.followers[key] = &followed{cacheKey: key, cachePlace: cachePlace{model: engine, labels: labels}}
	}
	// Those that are asked are of one model then.
	for zone, expected := range map[string]string{"x": "A", "y": "B"} {
		asked, err := index.asked(Question{Labels: map[string]string{"zone": zone}})
		if err != nil || len(asked) != 1 || asked[0].engine != expected {
			t.Error(zone, asked, err)
		}
	}
	if asked, err := index.asked(Question{Labels: map[string]string{"zone": "x", "rack": ""}}); err != nil || len(asked) > 0 {
		t.Error(asked, err)
	}
}

func TestAFullStateTakesThePlaceOfWhatWasKnownOnceItIsComplete(t *testing.T) {
	mirror := newEngineMirror()
	full := changed(2, rowOf(0, 0, 1, "a:1"), rowOf(0, 1, 1, "a:2"))
	full.StateBegins, full.StateComplete = true, true
	if news := mirror.apply(full); !news["e"] || len(mirror.engines["e"].publishers()) != 1 {
		t.Fatal(news, mirror.engines)
	}
	begins := &kvgrpcv1.WatchEnginesResponse{StateBegins: true, WarmingUp: true}
	if news := mirror.apply(begins); len(news) > 0 || mirror.engines["e"] == nil || !mirror.warmingUp {
		t.Fatal("half a state is news:", news)
	}
	if news := mirror.apply(&kvgrpcv1.WatchEnginesResponse{StateComplete: true}); !news["e"] || len(mirror.engines) > 0 {
		t.Fatal(news, mirror.engines)
	}
}

func TestARowThatWasReplacedDoesNotGoWithItsOlderIncarnation(t *testing.T) {
	mirror := newEngineMirror()
	mirror.apply(changed(1, rowOf(0, 0, 2, "a:1")))
	late := changed(1)
	late.Changes[0].Gone = []*kvgrpcv1.RankRef{{Rank: &kvgrpcv1.RankId{Engine: "e"}, Epoch: 1}}
	mirror.apply(late)
	if len(mirror.engines["e"].publishers()) != 1 {
		t.Error("epoch 2 went with epoch 1")
	}
	mirror.apply(changed(0))
	if len(mirror.engines) > 0 {
		t.Error("an engine without ranks is there")
	}
}
