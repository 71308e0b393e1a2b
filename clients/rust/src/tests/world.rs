//! A publisher that goes on, compacts its log, restarts and loses connections, as its seed says: what a follower shows is
//! always a state that the cache really had, in the log that is not known to be over.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tonic::{Code, Status};

use super::script::*;
use crate::pb::{self, WatchMode, WatchRequest};
use crate::watch::{Calls, Item, Stream, Watcher};
use crate::{decode_batch, BlockHash, Cache, Place, Verdict};

/// The blocks of one state.
type Shown = BTreeSet<u64>;

struct World {
    random: fastrand::Rng,
    log: u32,
    oldest: u64,
    payloads: Vec<Vec<u8>>,
    cache: Cache,
    copies: BTreeMap<u8, u32>,
    /// Every state that each of its logs ever had.
    states: BTreeMap<String, BTreeSet<Shown>>,
    /// Its follower was told that its log is over.
    stale: bool,
}

fn shown_by(cache: &Cache) -> Shown {
    let device = Place::new("", 0);
    (0..=100).filter(|hash| cache.holds(&device, &BlockHash::Value(*hash))).collect()
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            random: fastrand::Rng::with_seed(seed),
            log: 0,
            oldest: 0,
            payloads: Vec::new(),
            cache: Cache::new(),
            copies: BTreeMap::new(),
            states: BTreeMap::new(),
            stale: false,
        };
        world.restart();
        world
    }

    fn name(&self) -> String {
        format!("log{}", self.log)
    }

    fn next(&self) -> u64 {
        self.payloads.len() as u64
    }

    fn restart(&mut self) {
        self.log += 1;
        (self.oldest, self.payloads, self.cache, self.copies) = (0, Vec::new(), Cache::new(), BTreeMap::new());
        // A block that stays: from here on an empty cache is no state of this one.
        self.store(100);
    }

    fn store(&mut self, hash: u8) {
        *self.copies.entry(hash).or_insert(0) += 1;
        self.add(stored(hash));
    }

    fn publish(&mut self) {
        let hash = self.random.u8(..100);
        if self.random.bool() {
            return self.store(hash);
        }
        self.copies.entry(hash).and_modify(|copies| *copies = copies.saturating_sub(1));
        self.add(removed(hash));
    }

    fn add(&mut self, payload: Vec<u8>) {
        self.cache.apply(&decode_batch(&payload).unwrap().events);
        self.payloads.push(payload);
        self.states.entry(self.name()).or_default().insert(shown_by(&self.cache));
    }

    fn live(&mut self) {
        for _ in 0..self.random.u32(..20) {
            self.publish();
        }
        match self.random.u32(..6) {
            0 => self.oldest = self.next(),
            1 => self.restart(),
            _ => {}
        }
    }

    fn digest(&self) -> pb::StateDigest {
        pb::StateDigest { next_sequence: self.next(), tiers: self.cache.digest(), ..Default::default() }
    }

    fn snapshot(&mut self) -> Vec<pb::WatchResponse> {
        let copies = self.copies.iter().flat_map(|(hash, copies)| vec![*hash; *copies as usize]);
        let next = self.next();
        let mut parts: Vec<_> =
            copies.enumerate().map(|(index, hash)| storing(next, index as u32, false, hash)).collect();
        parts.push(snapshot_end(next, parts.len() as u32, self.digest()));
        if self.random.u32(..4) == 0 {
            // The log overtook this one: another one begins.
            let some = parts[..self.random.usize(..parts.len())].to_vec();
            return [some, parts].concat();
        }
        parts
    }
}

impl Calls for &mut World {
    type Call = Said;

    async fn watch(&mut self, request: WatchRequest) -> Result<Said, Status> {
        self.live();
        if !request.log_id.is_empty() && request.log_id != self.name() {
            self.stale = true;
            return Err(refused(Code::Aborted, "STALE_LOG").unwrap());
        }
        let mut from = request.from_sequence.unwrap_or(0);
        if request.from_sequence.is_some() && from < self.oldest {
            return Err(refused(Code::OutOfRange, "EVENTS_COMPACTED").unwrap());
        }
        let mut messages = vec![begin(&self.name(), self.next())];
        if request.mode() == WatchMode::Snapshot {
            messages.append(&mut self.snapshot());
            from = self.next();
            for _ in 0..self.random.u32(..5) {
                self.publish();
            }
        }
        while from < self.next() {
            let count = self.random.u64(1..4).min(self.next() - from);
            messages.push(batches(from, &self.payloads[from as usize..(from + count) as usize]));
            from += count;
        }
        messages.push(heartbeat(self.next(), Some(self.digest())));
        if self.random.u32(..3) > 0 {
            messages.truncate(1 + self.random.usize(..messages.len()));
        }
        Ok(Said(messages.into(), broken()))
    }
}

/// Looks at what is shown after each item; `stale` is the world's.
#[tokio::test(start_paused = true)]
async fn what_is_shown_is_always_a_state_that_the_cache_had() {
    for seed in 0..20 {
        let mut world = World::new(seed);
        let mut seen: Vec<(bool, bool, String, Shown)> = Vec::new();
        let mut exact = 0;
        {
            let mut follower = Watcher::new(&mut world, Cache::new(), Stream::default());
            let mut known = false;
            let end = tokio::time::Instant::now() + Duration::from_secs(120);
            while let Ok(item) = tokio::time::timeout_at(end, follower.next()).await {
                match &item {
                    Item::Void(_) => known = false,
                    Item::Events { complete, .. } => known |= complete,
                    _ => {}
                }
                let cache = &mut follower.listener;
                if let Item::Current { state, .. } = &item {
                    exact += u32::from(cache.compare(state.as_ref()) == Verdict::Equal);
                }
                let is_stale = std::mem::take(&mut follower.calls.stale);
                seen.push((known, is_stale, cache.log_id().to_owned(), shown_by(cache)));
            }
        }
        for (known, is_stale, log, shown) in &seen {
            assert!(!(*known && *is_stale), "seed {seed}: {log} is over, and shown");
            assert!(*known || shown.is_empty(), "seed {seed}: {shown:?} of {log}, of which nothing is known");
            assert!(!known || world.states[log].contains(shown), "seed {seed}: {log} never had {shown:?}");
        }
        assert!(exact > 0, "seed {seed}: it was never exact");
    }
}
