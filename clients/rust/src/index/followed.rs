//! One cache of an index: what it holds, and how fresh that is. What it shows is a state that the cache had.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::blocks::Blocks;
use crate::cache::Kept;
use crate::contents::{Contents, Place};
use crate::holders::Slot;
use crate::index::planning::calculable;
use crate::index::saved::SavedCache;
use crate::index::table::duration_to_pb;
use crate::index::{CacheKey, CachePlace};
use crate::pb::{self, watch_response::Kind, IndexSourceState as State, WatchResponse};
use crate::watch::Item;
use crate::Verdict;

/// An engine that nobody reaches must not attract requests for ever.
pub(crate) const HIDE_AFTER: Duration = Duration::from_secs(30);

pub(crate) struct Followed {
    pub(crate) key: CacheKey,
    pub(crate) place: CachePlace,
    pub(crate) kept: Kept,
    /// The cache shows a state, which all batches before `next` led to.
    known: bool,
    next: u64,
    /// The log that was begun last, and the sequence of its next batch as last told.
    log_id: String,
    upcoming: u64,
    /// A call said something, and goes on.
    begun: bool,
    heard_at: Option<Instant>,
    exact_at: Option<Instant>,
    unreachable_since: Option<Instant>,
    /// What its engine said last of what it has to do.
    pub(crate) load: Option<pb::EngineLoad>,
    last_error: String,
    snapshots: u32,
    new_logs: u32,
    digests_equal: u32,
    digests_different: u32,
}

impl Followed {
    pub(crate) fn new(blocks: &mut Blocks, key: CacheKey, place: CachePlace) -> Self {
        Self {
            key,
            place,
            kept: Kept::new(blocks),
            known: false,
            next: 0,
            log_id: String::new(),
            upcoming: 0,
            begun: false,
            heard_at: None,
            exact_at: None,
            unreachable_since: None,
            load: None,
            last_error: String::new(),
            snapshots: 0,
            new_logs: 0,
            digests_equal: 0,
            digests_different: 0,
        }
    }

    /// Begins to take what was saved, which `restored` ends.
    pub(crate) fn restore(&mut self, blocks: &mut Blocks) {
        self.kept.shadow = Some(Contents::new(blocks, false));
    }

    /// Whether what was given is what was saved: it is shown then.
    pub(crate) fn restored(&mut self, blocks: &mut Blocks, saved: &SavedCache) -> bool {
        self.known = self.kept.restored(blocks, saved);
        if self.known {
            (self.log_id, self.next) = (saved.log_id.clone(), saved.next_sequence);
            self.upcoming = self.next;
        }
        self.known
    }

    /// What may be known again later; None where it is not exact, or hidden.
    pub(crate) fn saved(&self, now: Instant) -> Option<(SavedCache, Vec<(Place, Slot)>)> {
        let contents = &self.kept.contents;
        if !self.is_shown(now) || contents.partial || contents.doubtful {
            return None;
        }
        let places = contents.places.iter().map(|(place, held)| (place.clone(), held.slot)).collect();
        Some((SavedCache::of(&self.key, &self.log_id, contents), places))
    }

    pub(crate) fn hear(&mut self, blocks: &mut Blocks, item: &Item, now: Instant) -> Verdict {
        match item {
            Item::Void(_) => self.known = false,
            Item::Reset { log_id, .. } => self.known &= *log_id == self.kept.log_id,
            Item::Failed { cause, .. } => {
                self.note_exact();
                (self.begun, self.last_error) = (false, cause.to_string());
                self.unreachable_since.get_or_insert(now);
            }
            _ => {}
        }
        let is_snapshot = self.kept.shadow.is_some();
        let verdict = self.kept.hear(blocks, item);
        self.digests_equal += u32::from(verdict == Verdict::Equal);
        self.digests_different += u32::from(verdict == Verdict::Different);
        match item {
            Item::Events { next_sequence, complete: true, .. } if verdict != Verdict::Different => {
                (self.known, self.next) = (true, *next_sequence);
                self.upcoming = self.upcoming.max(self.next);
                self.snapshots += u32::from(is_snapshot);
            }
            Item::Current { .. } if verdict == Verdict::Different => self.known = false,
            Item::Current { next_sequence, .. } => self.next = *next_sequence,
            _ => {}
        }
        verdict
    }

    /// A call begins: what one before it began to say is not gone on with.
    pub(crate) fn called(&mut self, blocks: &mut Blocks) {
        self.note_exact();
        self.begun = false;
        self.kept.leave_shadow(blocks);
    }

    /// Sees each message before it is heard: whatever another log makes untrue is shown no more.
    pub(crate) fn came(&mut self, message: &WatchResponse, now: Instant) {
        self.note_exact();
        self.heard_at = Some(now);
        match &message.kind {
            Some(Kind::Begin(begin)) => {
                let stream = begin.stream.clone().unwrap_or_default();
                if stream.log_id != self.log_id {
                    self.new_logs += u32::from(!self.log_id.is_empty());
                    (self.log_id, self.upcoming, self.known) = (stream.log_id, 0, false);
                }
                (self.begun, self.unreachable_since) = (true, None);
                self.upcoming = self.upcoming.max(stream.next_sequence);
            }
            Some(Kind::Heartbeat(beat)) => {
                self.upcoming = self.upcoming.max(beat.next_sequence);
                self.load = beat.load.clone().map(calculable);
            }
            _ => {}
        }
    }

    fn note_exact(&mut self) {
        self.exact_at = self.exact();
    }

    /// When the contents were last known to be those of the cache; None: never.
    fn exact(&self) -> Option<Instant> {
        if self.state() == State::Current {
            self.heard_at
        } else {
            self.exact_at
        }
    }

    pub(crate) fn is_exact_within(&self, most: Duration, now: Instant) -> bool {
        self.exact().is_some_and(|exact| now.saturating_duration_since(exact) <= most)
    }

    pub(crate) fn state(&self) -> State {
        match () {
            () if self.begun && self.kept.shadow.is_some() => State::Rebuilding,
            () if !self.begun || !self.known => State::Connecting,
            () if self.kept.contents.doubtful => State::Doubtful,
            () if self.next < self.upcoming => State::CatchingUp,
            () => State::Current,
        }
    }

    /// Batches that are known to be missing.
    pub(crate) fn lag(&self) -> u64 {
        if self.known {
            self.upcoming.saturating_sub(self.next)
        } else {
            self.upcoming
        }
    }

    pub(crate) fn is_shown(&self, now: Instant) -> bool {
        self.known && self.unreachable_since.is_none_or(|since| now.saturating_duration_since(since) < HIDE_AFTER)
    }

    pub(crate) fn freshness(&self, now: Instant) -> pb::Freshness {
        let contents = &self.kept.contents;
        pb::Freshness {
            state: self.state().into(),
            log_id: self.log_id.clone(),
            next_sequence: if self.known { self.next } else { 0 },
            lag_batches: self.lag(),
            idle_time: self.heard_at.map(|at| duration_to_pb(now.saturating_duration_since(at))),
            whole: self.known && !contents.partial && !contents.doubtful,
        }
    }

    pub(crate) fn source(&self, now: Instant) -> pb::IndexSource {
        let mut blocks: BTreeMap<&str, u64> = BTreeMap::new();
        for (place, held) in self.kept.contents.places.iter().filter(|(place, _)| self.known && place.group == 0) {
            *blocks.entry(&place.medium).or_insert(0) += held.blocks;
        }
        pb::IndexSource {
            engine: self.key.engine.clone(),
            dp: self.key.dp,
            address: self.place.address.clone(),
            live: false,
            freshness: Some(self.freshness(now)),
            blocks: blocks.into_iter().map(to_tier_blocks).collect(),
            page_tokens: if self.known { self.kept.contents.page_tokens } else { 0 },
            snapshots: self.snapshots,
            replays: 0,
            new_logs: self.new_logs,
            digests_equal: self.digests_equal,
            digests_different: self.digests_different,
            last_error: self.last_error.clone(),
            model: self.place.model.clone(),
            labels: self.place.labels.clone(),
        }
    }
}

fn to_tier_blocks((medium, blocks): (&str, u64)) -> pb::TierBlocks {
    let tier = match medium {
        "GPU" => pb::Tier::Device,
        "CPU" | "CPU_PINNED" => pb::Tier::Host,
        _ => pb::Tier::Storage,
    };
    pb::TierBlocks { tier: tier.into(), medium: medium.to_owned(), blocks }
}
