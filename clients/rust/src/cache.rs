//! The contents of one cache as a Watch tells them, compared with the publisher's digests.

use std::collections::BTreeMap;

use crate::batch::{BlockHash, Event};
use crate::blocks::Blocks;
use crate::contents::{same_tiers, Contents, Place, Verdict};
use crate::index::SavedCache;
use crate::pb;
use crate::watch::Item;

/// What one cache holds by what its events said.
///
/// A block that is stored twice is there until it is removed twice; what is removed and was not there changes nothing. What it
/// shows while `hear` is given a snapshot is the state before it, until the snapshot is complete.
pub struct Cache {
    blocks: Blocks,
    kept: Kept,
}

impl Default for Cache {
    fn default() -> Self {
        let mut blocks = Blocks::new(0);
        let kept = Kept::new(&mut blocks);
        Self { blocks, kept }
    }
}

impl Cache {
    /// An empty cache.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the events of one batch, in order.
    pub fn apply(&mut self, events: &[Event]) {
        self.kept.contents.apply(&mut self.blocks, events);
    }

    /// Takes an item of a Watch, in order, and compares where it brings the publisher's digest. A snapshot that does not come
    /// to its own digest is `Different`, and changes nothing.
    pub fn hear(&mut self, item: &Item) -> Verdict {
        self.kept.hear(&mut self.blocks, item)
    }

    /// Whether this was what it held at the moment of a publisher's digest: that of now, or of one of the last checkpoints. It
    /// knows moments by what `hear` was told.
    pub fn compare(&mut self, state: Option<&pb::StateDigest>) -> Verdict {
        self.kept.contents.compare(state)
    }

    /// Whether this is what the publisher says of its own state at the same sequence.
    pub fn is(&self, state: &pb::StateDigest) -> bool {
        same_tiers(&self.kept.contents.digest(), &state.tiers)
    }

    /// The tiers of its own digest.
    pub fn digest(&self) -> Vec<pb::TierDigest> {
        self.kept.contents.digest()
    }

    /// The log that was begun last; empty: none.
    pub fn log_id(&self) -> &str {
        &self.kept.log_id
    }

    /// Whether an event which cannot be read here may have been a removal: blocks that it shows may be gone. It ends with a
    /// digest or snapshot of a publisher that can read it, or when everything is cleared.
    pub fn doubtful(&self) -> bool {
        self.kept.contents.doubtful
    }

    /// Whether it is exact: false while `doubtful`, and where the log began before what could be read, no snapshot is served,
    /// and nothing was cleared since. There may be more blocks then than it shows, never fewer.
    pub fn whole(&self) -> bool {
        !self.kept.contents.partial && !self.doubtful()
    }

    /// Whether a block is in a place.
    pub fn holds(&self, place: &Place, hash: &BlockHash) -> bool {
        let held = self.kept.contents.places.get(place);
        held.is_some_and(|held| self.blocks.holders().has(self.blocks.set_of(hash.key()), held.slot))
    }

    /// The different blocks of each place that has any.
    pub fn blocks(&self) -> BTreeMap<Place, u64> {
        self.kept.contents.places.iter().map(|(place, held)| (place.clone(), held.blocks)).collect()
    }

    /// Tokens in a block as last told; 0: not yet.
    pub fn page_tokens(&self) -> u32 {
        self.kept.contents.page_tokens
    }

    /// How many of the first blocks (`BlockHash::key`) it holds on the device; there or on the host; there or on a disk;
    /// anywhere.
    pub fn leading(&self, hashes: &[u64]) -> [usize; 4] {
        self.kept.contents.leading(&self.blocks, hashes)
    }
}

/// What is shown of a cache, and what a snapshot has said so far.
pub(crate) struct Kept {
    pub(crate) contents: Contents,
    pub(crate) shadow: Option<Contents>,
    pub(crate) log_id: String,
}

impl Kept {
    pub(crate) fn new(blocks: &mut Blocks) -> Self {
        Self { contents: Contents::new(blocks, false), shadow: None, log_id: String::new() }
    }

    pub(crate) fn hear(&mut self, blocks: &mut Blocks, item: &Item) -> Verdict {
        match item {
            Item::Void(_) => self.forget(blocks),
            Item::Reset { log_id, whole } => {
                if *log_id != self.log_id {
                    self.forget(blocks);
                }
                self.log_id.clone_from(log_id);
                self.leave_shadow(blocks);
                self.shadow = Some(Contents::new(blocks, !whole));
            }
            Item::Events { next_sequence, events, complete, state, .. } => {
                let told = self.shadow.as_mut().unwrap_or(&mut self.contents);
                told.apply(blocks, events);
                if *complete {
                    return self.completed(blocks, *next_sequence, state.as_ref());
                }
            }
            Item::Current { state, .. } => return self.contents.compare(state.as_ref()),
            Item::Failed { .. } => {}
        }
        Verdict::Unknown
    }

    /// What the shadow was given takes the place of what is shown, where it comes to its digest; else it is dropped.
    pub(crate) fn restored(&mut self, blocks: &mut Blocks, saved: &SavedCache) -> bool {
        let Some(mut told) = self.shadow.take() else { return false };
        (told.next, told.page_tokens, told.groups) = (saved.next_sequence, saved.page_tokens, saved.groups());
        let is_whole = same_tiers(&told.digest(), &saved.digest());
        if is_whole {
            self.log_id.clone_from(&saved.log_id);
            std::mem::swap(&mut self.contents, &mut told);
        }
        told.drop_from(blocks);
        is_whole
    }

    /// What a call before this one began to say is not gone on with.
    pub(crate) fn leave_shadow(&mut self, blocks: &mut Blocks) {
        if let Some(shadow) = self.shadow.take() {
            shadow.drop_from(blocks);
        }
    }

    pub(crate) fn drop_from(mut self, blocks: &mut Blocks) {
        self.leave_shadow(blocks);
        self.contents.drop_from(blocks);
    }

    fn completed(&mut self, blocks: &mut Blocks, next: u64, state: Option<&pb::StateDigest>) -> Verdict {
        let Some(mut told) = self.shadow.take() else {
            self.contents.advance(next);
            return self.contents.compare(state);
        };
        told.advance(next);
        let verdict = told.compare(state);
        if state.is_some_and(|state| state.doubtful) {
            // Its publisher cannot read what came either.
            told.doubt_from(next);
        }
        if verdict != Verdict::Different {
            std::mem::swap(&mut self.contents, &mut told);
        }
        told.drop_from(blocks);
        verdict
    }

    fn forget(&mut self, blocks: &mut Blocks) {
        self.leave_shadow(blocks);
        let nothing = Contents::new(blocks, true);
        std::mem::replace(&mut self.contents, nothing).drop_from(blocks);
    }
}
