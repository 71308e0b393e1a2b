//! What one cache holds by what its events said, in a table of its own or of many.

use std::collections::BTreeMap;

use crate::batch::{BlockHash, BlockStored, Event};
use crate::blocks::{Blocks, Owner};
use crate::groups::{reach_of, size_of, usable, CacheGroup, HOST, MOST_GROUPS, NOWHERE, PREFIX_GROUP, REACHES};
use crate::holders::{SetId, Slot};
use crate::pb;

/// A cache holds blocks in so many places at most: what names another one is passed over, by every reader.
pub const MAX_PLACES: usize = 1024;
/// The longest name of a tier, in bytes.
pub const MAX_MEDIUM_BYTES: usize = 128;

/// Under load a publisher's digest is older than what its readers have by then: both keep those of multiples of this.
const CHECKPOINT_BATCHES: u64 = 64;
const CHECKPOINTS: u64 = 64;

/// A tier and group: the engine's name of the tier in capitals, "GPU" where it named none.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The tier.
    pub medium: String,
    /// The cache group.
    pub group: u32,
}

impl Place {
    /// The place that an event names.
    pub fn new(medium: &str, group: u32) -> Self {
        let medium = if medium.is_empty() { "GPU".to_owned() } else { medium.to_ascii_uppercase() };
        Self { medium, group }
    }
}

/// What comparing with a publisher's digest says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// There was no digest, or of a moment that is not kept any more, or the cache was not seen from its beginning.
    Unknown,
    /// This was the publisher's state at that moment.
    Equal,
    /// Something is lost, here or there. Begin again with a snapshot.
    Different,
}

/// Who holds the blocks of one place, and what its digest comes to.
pub(crate) struct Held {
    pub(crate) slot: Slot,
    pub(crate) blocks: u64,
    mixed: u64,
}

pub(crate) struct Contents {
    pub(crate) owner: Owner,
    pub(crate) places: BTreeMap<Place, Held>,
    /// All batches before it are in.
    pub(crate) next: u64,
    /// It was not seen from its beginning, and nothing cleared it since.
    pub(crate) partial: bool,
    /// With a batch from `doubt_at` on something may have been removed that cannot be read here.
    pub(crate) doubtful: bool,
    doubt_at: u64,
    /// Tokens in a block as last told, 0 before; and what the other groups than the first are.
    pub(crate) page_tokens: u32,
    pub(crate) groups: BTreeMap<u32, CacheGroup>,
    past: BTreeMap<u64, Vec<pb::TierDigest>>,
}

impl Contents {
    /// Nothing, in a table. It must be dropped from it by `drop_from`.
    pub(crate) fn new(blocks: &mut Blocks, partial: bool) -> Self {
        Self {
            owner: blocks.new_owner(),
            places: BTreeMap::new(),
            next: 0,
            partial,
            doubtful: false,
            doubt_at: 0,
            page_tokens: 0,
            groups: BTreeMap::new(),
            past: BTreeMap::new(),
        }
    }

    pub(crate) fn apply(&mut self, blocks: &mut Blocks, events: &[Event]) {
        for event in events {
            match event {
                Event::BlockStored(event) => {
                    let place = Place::new(&event.medium, event.group);
                    self.store(blocks, place, event.hashes.iter().map(BlockHash::key));
                    self.learn(event);
                }
                Event::BlockRemoved(event) => {
                    self.remove(blocks, &Place::new(&event.medium, event.group), &event.hashes)
                }
                Event::AllBlocksCleared => {
                    self.clear(blocks);
                    self.partial = false;
                }
                Event::TierBlocksCleared { medium, .. } => {
                    let medium = Place::new(medium, 0).medium;
                    self.retire(blocks, |place| place.medium == medium);
                }
                Event::Unknown { name, .. } if name == "BlockStored" => {}
                Event::Unknown { .. } => (self.doubtful, self.doubt_at) = (true, self.next),
            }
        }
    }

    pub(crate) fn clear(&mut self, blocks: &mut Blocks) {
        self.retire(blocks, |_| true);
        self.doubtful = false;
    }

    /// Lets go of all that it holds in the table.
    pub(crate) fn drop_from(mut self, blocks: &mut Blocks) {
        self.retire(blocks, |_| true);
        blocks.free_owner(self.owner);
    }

    fn retire(&mut self, blocks: &mut Blocks, is_out: impl Fn(&Place) -> bool) {
        self.places.retain(|place, held| {
            let stays = !is_out(place);
            if !stays {
                blocks.retire(held.slot, held.blocks);
            }
            stays
        });
    }

    /// A copy of each came.
    pub(crate) fn store(
        &mut self,
        blocks: &mut Blocks,
        place: Place,
        keys: impl ExactSizeIterator<Item = u64> + Clone,
    ) {
        let is_admitted = self.places.len() < MAX_PLACES && place.medium.len() <= MAX_MEDIUM_BYTES;
        if keys.len() == 0 || (!is_admitted && !self.places.contains_key(&place)) {
            return;
        }
        let (owner, reach, group) = (self.owner, reach_of(&place.medium), place.group);
        let new = || Held { slot: blocks.new_slot(owner, reach, group), blocks: 0, mixed: 0 };
        let held = self.places.entry(place).or_insert_with(new);
        for key in keys.clone() {
            held.mixed = held.mixed.wrapping_add(mix(key));
        }
        held.blocks += blocks.store(held.slot, keys);
    }

    fn remove(&mut self, blocks: &mut Blocks, place: &Place, hashes: &[BlockHash]) {
        let Some(held) = self.places.get_mut(place) else { return };
        let mixed = &mut held.mixed;
        let gone = |key| *mixed = mixed.wrapping_sub(mix(key));
        held.blocks -= blocks.remove(held.slot, hashes.iter().map(BlockHash::key), gone);
        if held.blocks == 0 {
            blocks.retire(held.slot, 0);
            self.places.remove(place);
        }
    }

    /// Takes sizes and kinds, as the last event tells them.
    fn learn(&mut self, event: &BlockStored) {
        if event.group == PREFIX_GROUP {
            self.page_tokens = size_of(event).unwrap_or(self.page_tokens);
        } else if self.groups.contains_key(&event.group) || self.groups.len() < MOST_GROUPS {
            self.groups.entry(event.group).or_default().learn(event);
        }
    }

    pub(crate) fn advance(&mut self, next: u64) {
        self.next = next;
        if !next.is_multiple_of(CHECKPOINT_BATCHES) || self.partial {
            return;
        }
        self.past.insert(next, self.digest());
        // Holes of dropped batches may step over one: the number is bounded all the same.
        self.past.retain(|old, _| old + CHECKPOINTS * CHECKPOINT_BATCHES > next);
    }

    /// Whether this was what it held at the moment of a publisher's digest.
    pub(crate) fn compare(&mut self, state: Option<&pb::StateDigest>) -> Verdict {
        let Some(state) = state.filter(|state| state.kind <= pb::DigestKind::Mix64Sum as i32 && !self.partial) else {
            return Verdict::Unknown;
        };
        let now;
        let own = if state.next_sequence == self.next {
            now = self.digest();
            &now
        } else {
            match self.past.get(&state.next_sequence) {
                Some(own) => own,
                None => return Verdict::Unknown,
            }
        };
        if same_tiers(own, &state.tiers) {
            // Its publisher can read what came before, and the blocks are these.
            self.doubtful &= state.doubtful || self.doubt_at >= state.next_sequence;
            return Verdict::Equal;
        }
        if state.doubtful && !self.doubtful {
            // It counts blocks that may be gone, by an event that was read here.
            return Verdict::Unknown;
        }
        Verdict::Different
    }

    /// How many of the first blocks it holds on the device; there or on the host; there or on a disk; anywhere.
    pub(crate) fn leading(&self, blocks: &Blocks, hashes: &[u64]) -> [usize; REACHES] {
        let (mut ends, mut longest, mut end, mut walk) = ([0; REACHES], 0, 0, blocks.walk());
        while end < hashes.len() && longest < NOWHERE {
            let nearest = self.nearest(blocks, PREFIX_GROUP, walk.set_of(hashes[end]));
            while longest < nearest {
                ends[longest] = end;
                longest += 1;
            }
            end += 1;
        }
        ends[longest..].fill(end);
        self.of_use(blocks, ends, hashes, 0)
    }

    /// What of a prefix of the first group is of use, where the other groups of the model are here too.
    pub(crate) fn of_use(
        &self,
        blocks: &Blocks,
        ends: [usize; REACHES],
        hashes: &[u64],
        step: u32,
    ) -> [usize; REACHES] {
        if self.groups.is_empty() {
            return ends;
        }
        let mut found = ends;
        for (reach, end) in found.iter_mut().enumerate() {
            let holds = |group, end: usize| self.nearest(blocks, group, blocks.set_of(hashes[end - 1])) <= reach;
            let groups = self.groups.iter().map(|(number, group)| (*number, group));
            *end = usable(*end, self.page_tokens, step, groups, holds);
        }
        found
    }

    /// How many of the first blocks lie on the host itself, whatever the device has.
    pub(crate) fn on_host(&self, blocks: &Blocks, sets: &[SetId]) -> usize {
        let slots: Vec<Slot> = self
            .places
            .iter()
            .filter(|(place, _)| place.group == PREFIX_GROUP && reach_of(&place.medium) == HOST)
            .map(|(_, held)| held.slot)
            .collect();
        let (mut before, mut is_there) = (None, false);
        let missing = sets.iter().position(|set| {
            if before.replace(*set) != Some(*set) {
                is_there = slots.iter().any(|slot| blocks.holders().has(*set, *slot));
            }
            !is_there
        });
        missing.unwrap_or(sets.len())
    }

    /// How far one has to reach for a block with these holders, in a group.
    fn nearest(&self, blocks: &Blocks, group: u32, set: SetId) -> usize {
        let held =
            self.places.iter().filter(|(place, held)| place.group == group && blocks.holders().has(set, held.slot));
        held.map(|(place, _)| reach_of(&place.medium)).min().unwrap_or(NOWHERE)
    }

    pub(crate) fn doubt_from(&mut self, next: u64) {
        (self.doubtful, self.doubt_at) = (true, next);
    }

    /// The tiers of its own digest, by medium and group.
    pub(crate) fn digest(&self) -> Vec<pb::TierDigest> {
        self.places
            .iter()
            .map(|(place, held)| pb::TierDigest {
                medium: place.medium.clone(),
                group: place.group,
                blocks: held.blocks,
                mixed_hashes: held.mixed,
                ..Default::default()
            })
            .collect()
    }
}

pub(crate) fn same_tiers(own: &[pb::TierDigest], told: &[pb::TierDigest]) -> bool {
    own.len() == told.len()
        && own.iter().zip(told).all(|(own, told)| {
            (&own.medium, own.group, own.blocks, own.mixed_hashes)
                == (&told.medium, told.group, told.blocks, told.mixed_hashes)
        })
}

/// The finalizer of splitmix64, as docs/events.md has it.
pub(crate) fn mix(key: u64) -> u64 {
    let mut z = key.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
