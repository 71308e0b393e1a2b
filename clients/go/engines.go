package kvgrpc

import kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"

// engineMirror is what a reader of WatchEngines knows. A full state takes the place of what was known in one step, when it is
// complete: until then the old one stands.
type engineMirror struct {
	engines   map[string]*mirroredEngine
	coming    map[string]*mirroredEngine
	warmingUp bool
}

type coordinates struct{ dp, pp, cp, tp uint32 }

// mirroredEngine is one engine: its head without rows, and its rows.
type mirroredEngine struct {
	head *kvgrpcv1.Engine
	rows map[coordinates]*kvgrpcv1.RankRow
}

func newEngineMirror() *engineMirror {
	return &engineMirror{engines: map[string]*mirroredEngine{}, warmingUp: true}
}

// apply takes one message: the names of engines that are news now.
func (mirror *engineMirror) apply(message *kvgrpcv1.WatchEnginesResponse) map[string]bool {
	mirror.warmingUp = message.WarmingUp
	if message.StateBegins {
		mirror.coming = map[string]*mirroredEngine{}
	}
	into := mirror.engines
	if mirror.coming != nil {
		into = mirror.coming
	}
	news := map[string]bool{}
	for _, change := range message.Changes {
		applyChange(into, change)
		news[change.GetEngine().GetName()] = true
	}
	switch {
	case mirror.coming == nil:
		return news
	case !message.StateComplete:
		return nil
	}
	for name := range mirror.engines {
		news[name] = true
	}
	for name := range mirror.coming {
		news[name] = true
	}
	mirror.engines, mirror.coming = mirror.coming, nil
	return news
}

func applyChange(engines map[string]*mirroredEngine, change *kvgrpcv1.EngineChange) {
	engine := change.GetEngine()
	mirrored := engines[engine.GetName()]
	if mirrored == nil {
		mirrored = &mirroredEngine{rows: map[coordinates]*kvgrpcv1.RankRow{}}
		engines[engine.GetName()] = mirrored
	}
	for _, gone := range change.Gone {
		at := coordinatesOf(gone.GetRank())
		if known := mirrored.rows[at]; known != nil && known.GetRank().GetEpoch() <= gone.GetEpoch() {
			delete(mirrored.rows, at)
		}
	}
	for _, row := range engine.GetRows() {
		mirrored.rows[coordinatesOf(row.GetRank().GetRank())] = row
	}
	mirrored.head = engine
	engine.Rows = nil
	if engine.GetRegisteredRanks() == 0 {
		delete(engines, engine.GetName())
	}
}

func coordinatesOf(rank *kvgrpcv1.RankId) coordinates {
	return coordinates{rank.GetDp(), rank.GetPp(), rank.GetCp(), rank.GetTp()}
}

// publishers are the rows of ranks that publish a cache: those with pp = cp = tp = 0 that serve events.
func (engine *mirroredEngine) publishers() (rows []*kvgrpcv1.RankRow) {
	for at, row := range engine.rows {
		if row.ServesEvents && at.pp == 0 && at.cp == 0 && at.tp == 0 {
			rows = append(rows, row)
		}
	}
	return rows
}
