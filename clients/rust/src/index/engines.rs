//! What a reader of WatchEngines knows.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::pb::{Engine, EngineChange, RankId, RankRow, WatchEnginesResponse};

/// A full state takes the place of what was known in one step, when it is complete: until then the old one stands.
pub(crate) struct EngineMirror {
    pub(crate) engines: BTreeMap<String, MirroredEngine>,
    coming: Option<BTreeMap<String, MirroredEngine>>,
    pub(crate) warming_up: bool,
    /// A full state came.
    pub(crate) complete: bool,
}

/// One engine: its head without rows, and its rows by dp, pp, cp, tp.
#[derive(Default)]
pub(crate) struct MirroredEngine {
    pub(crate) head: Engine,
    rows: HashMap<[u32; 4], RankRow>,
}

impl EngineMirror {
    pub(crate) fn new() -> Self {
        Self { engines: BTreeMap::new(), coming: None, warming_up: true, complete: false }
    }

    /// Takes one message: the names of engines that are news now.
    pub(crate) fn apply(&mut self, message: WatchEnginesResponse) -> BTreeSet<String> {
        self.warming_up = message.warming_up;
        if message.state_begins {
            self.coming = Some(BTreeMap::new());
        }
        let into = self.coming.as_mut().unwrap_or(&mut self.engines);
        let mut news = BTreeSet::new();
        for change in message.changes {
            if let Some(name) = apply_change(into, change) {
                news.insert(name);
            }
        }
        if self.coming.is_none() {
            return news;
        }
        if !message.state_complete {
            return BTreeSet::new();
        }
        self.complete = true;
        let fresh = self.coming.take().unwrap_or_default();
        let before = std::mem::replace(&mut self.engines, fresh);
        before.into_keys().chain(self.engines.keys().cloned()).collect()
    }
}

fn apply_change(engines: &mut BTreeMap<String, MirroredEngine>, change: EngineChange) -> Option<String> {
    let mut engine = change.engine?;
    let name = engine.name.clone();
    let mirrored = engines.entry(name.clone()).or_default();
    for gone in change.gone {
        let at = coordinates(gone.rank.as_ref());
        let epoch = |row: &RankRow| row.rank.as_ref().map_or(0, |rank| rank.epoch);
        if mirrored.rows.get(&at).is_some_and(|row| epoch(row) <= gone.epoch) {
            mirrored.rows.remove(&at);
        }
    }
    for row in std::mem::take(&mut engine.rows) {
        mirrored.rows.insert(coordinates(row.rank.as_ref().and_then(|rank| rank.rank.as_ref())), row);
    }
    let is_gone = engine.registered_ranks == 0;
    mirrored.head = engine;
    if is_gone {
        engines.remove(&name);
    }
    Some(name)
}

fn coordinates(rank: Option<&RankId>) -> [u32; 4] {
    rank.map_or([0; 4], |rank| [rank.dp, rank.pp, rank.cp, rank.tp])
}

impl MirroredEngine {
    /// The dp and the row of each rank that publishes a cache: those with pp = cp = tp = 0 that serve events.
    pub(crate) fn publishers(&self) -> impl Iterator<Item = (u32, &RankRow)> {
        let publishes = |at: &[u32; 4], row: &RankRow| row.serves_events && at[1..] == [0; 3];
        self.rows.iter().filter(move |(at, row)| publishes(at, row)).map(|(at, row)| (at[0], row))
    }
}
