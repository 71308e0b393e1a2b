//! Which slots hold a block, of one cache or of many: one entry for a block, whoever holds it.
//!
//! A slot that is emptied is retired at once: nobody looks at it any more, and what refers to it is swept little by little.

use std::collections::{BTreeMap, HashMap};

use crate::entries::{Chunk, Entries, Walk};
use crate::groups::PREFIX_GROUP;
use crate::holders::{place_of, slots_of, Holders, SetId, Slot, NOBODY};

/// Of so many placements that nobody looks at, or half of all blocks, a sweep is begun.
const LEAST_GARBAGE: u64 = 4096;

pub(crate) struct Blocks {
    entries: Entries,
    holders: Holders,
    slots: Vec<State>,
    /// Of each slot, of blocks with more than one copy, how many more.
    more: Vec<HashMap<u64, u32>>,
    free: Vec<Slot>,
    owners: Owner,
    free_owners: Vec<Owner>,
    /// Retired, and not swept yet; `sweeping`: those that the sweep is about, and its next chunk.
    retired: Vec<Slot>,
    garbage: u64,
    sweeping: Option<(Vec<u64>, Vec<Slot>, usize)>,
}

/// Whose a slot is. A cache has another owner while a snapshot takes the place of what it holds.
pub(crate) type Owner = u32;
/// Whose retired and unused slots are.
pub(crate) const NO_OWNER: Owner = Owner::MAX;

/// Small: a question looks at that of every slot.
#[derive(Clone, Copy)]
pub(crate) struct State {
    pub(crate) owner: Owner,
    /// How far one has to reach for its blocks.
    pub(crate) reach: u8,
    /// Its group is the one in which prefixes are matched.
    pub(crate) is_prefix: bool,
}

const UNUSED: State = State { owner: NO_OWNER, reach: 0, is_prefix: false };

impl Blocks {
    /// A table in 2^`bits` parts.
    pub(crate) fn new(bits: u32) -> Self {
        Self {
            entries: Entries::new(bits),
            holders: Holders::new(),
            slots: Vec::new(),
            more: Vec::new(),
            free: Vec::new(),
            owners: 0,
            free_owners: Vec::new(),
            retired: Vec::new(),
            garbage: 0,
            sweeping: None,
        }
    }

    pub(crate) fn holders(&self) -> &Holders {
        &self.holders
    }

    pub(crate) fn slot(&self, slot: Slot) -> State {
        self.slots[slot as usize]
    }

    #[cfg(test)]
    pub(crate) fn slots_ever(&self) -> usize {
        self.slots.len()
    }

    /// The slots that hold a block.
    #[inline]
    pub(crate) fn set_of(&self, key: u64) -> SetId {
        self.walk().set_of(key)
    }

    /// Goes through blocks that mostly came in this order.
    #[inline]
    pub(crate) fn walk(&self) -> Walk<'_> {
        self.entries.walk()
    }

    pub(crate) fn new_owner(&mut self) -> Owner {
        self.free_owners.pop().unwrap_or_else(|| {
            self.owners += 1;
            self.owners - 1
        })
    }

    /// The owner has no slots any more.
    pub(crate) fn free_owner(&mut self, owner: Owner) {
        self.free_owners.push(owner);
    }

    pub(crate) fn new_slot(&mut self, owner: Owner, reach: usize, group: u32) -> Slot {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(UNUSED);
            self.more.push(HashMap::new());
            (self.slots.len() - 1) as Slot
        });
        self.slots[slot as usize] = State { owner, reach: reach as u8, is_prefix: group == PREFIX_GROUP };
        slot
    }

    /// Nobody looks at the slot any more, which held so many blocks.
    pub(crate) fn retire(&mut self, slot: Slot, blocks: u64) {
        self.slots[slot as usize] = UNUSED;
        self.more[slot as usize] = HashMap::new();
        if blocks == 0 {
            self.free.push(slot);
            return;
        }
        self.retired.push(slot);
        self.garbage += blocks;
    }

    /// A copy of each came; how many were not there before.
    pub(crate) fn store(&mut self, slot: Slot, keys: impl Iterator<Item = u64>) -> u64 {
        let (mut appeared, mut step, mut next) = (0, Step::default(), 0);
        for key in keys {
            let found = self.entries.find(key, next);
            let before = found.map_or(NOBODY, |position| self.entries.set(position));
            if step.before != Some(before) {
                step.end(&mut self.holders);
                let has = self.holders.has(before, slot);
                let after = if has { before } else { self.holders.with(before, slot) };
                step = Step { before: Some(before), after, moved: 0 };
            }
            next = found.map_or(next, |position| position + 1);
            if step.after == before {
                *self.more[slot as usize].entry(key).or_insert(0) += 1;
                continue;
            }
            match found {
                Some(position) => self.entries.change(position, step.after),
                None => next = self.entries.insert(key, step.after) + 1,
            }
            step.moved += 1;
            appeared += 1;
        }
        step.end(&mut self.holders);
        self.sweep_some();
        appeared
    }

    /// A copy of each went. `gone` is told each that was there; how many were the last.
    pub(crate) fn remove(&mut self, slot: Slot, keys: impl Iterator<Item = u64>, mut gone: impl FnMut(u64)) -> u64 {
        let (mut vanished, mut next, mut out) = (0, 0, Vec::new());
        let (word, bit) = place_of(slot);
        for key in keys {
            let Some(position) = self.entries.find(key, next) else { continue };
            next = position + 1;
            let before = self.entries.set(position);
            if !self.holders.has(before, slot) {
                continue;
            }
            gone(key);
            let more = &mut self.more[slot as usize];
            if let Some(copies) = more.get_mut(&key) {
                *copies -= 1;
                if *copies == 0 {
                    more.remove(&key);
                }
                continue;
            }
            let after = self.holders.without(before, |at| if at == word { bit } else { 0 });
            self.entries.change(position, after);
            if after == NOBODY {
                out.push(position);
            } else {
                self.holders.used(after, 1);
            }
            self.holders.unused(before, 1);
            vanished += 1;
        }
        self.entries.remove(&mut out);
        self.sweep_some();
        vanished
    }

    /// Blocks that somebody holds; for some time after a slot was retired, more.
    pub(crate) fn len(&self) -> u64 {
        self.entries.len()
    }

    /// The table as it is now.
    pub(crate) fn cut(&self) -> BlocksCut {
        let more = |(slot, more): (usize, &HashMap<u64, u32>)| (!more.is_empty()).then(|| (slot as Slot, more.clone()));
        BlocksCut {
            chunks: self.entries.chunks().to_vec(),
            sets: self.holders.all().map(|(set, words)| (set, words.to_vec())).collect(),
            more: self.more.iter().enumerate().filter_map(more).collect(),
        }
    }

    /// One part of what a sweep is about, where there is one or much to be swept.
    fn sweep_some(&mut self) {
        if self.sweeping.is_none() {
            if self.garbage <= LEAST_GARBAGE || self.garbage <= self.len() / 2 {
                return;
            }
            let slots = std::mem::take(&mut self.retired);
            let mut mask = vec![0; self.slots.len().div_ceil(64)];
            for &slot in &slots {
                let (word, bit) = place_of(slot);
                mask[word as usize] |= bit;
            }
            self.garbage = 0;
            self.sweeping = Some((mask, slots, 0));
        }
        let Some((mask, slots, chunk)) = &mut self.sweeping else { return };
        let is_out = |word: u32| mask.get(word as usize).copied().unwrap_or(0);
        let holders = &mut self.holders;
        let is_swept = self.entries.sweep(*chunk, |before| {
            let after = holders.without(before, is_out);
            if after != before {
                if after != NOBODY {
                    holders.used(after, 1);
                }
                holders.unused(before, 1);
            }
            after
        });
        *chunk += 1;
        if !is_swept {
            self.free.append(slots);
            self.sweeping = None;
        }
    }
}

/// A table at one moment.
pub(crate) struct BlocksCut {
    chunks: Vec<Chunk>,
    sets: Vec<(SetId, Vec<(u32, u64)>)>,
    more: HashMap<Slot, HashMap<u64, u32>>,
}

/// Blocks ordered by the sets of slots that hold them.
pub(crate) struct BySet {
    blocks: Vec<u64>,
    ends: Vec<usize>,
}

impl BySet {
    pub(crate) fn of(&self, set: SetId) -> &[u64] {
        let begin = if set == 0 { 0 } else { self.ends[set as usize - 1] };
        &self.blocks[begin..self.ends[set as usize]]
    }
}

impl BlocksCut {
    /// Lets go of the table on the way.
    pub(crate) fn by_set(&mut self) -> BySet {
        let sets = self.sets.iter().map(|(set, _)| *set as usize + 1).max().unwrap_or(1);
        let mut ends = vec![0; sets];
        for (_, set) in self.chunks.iter().flat_map(Chunk::taken) {
            ends[set as usize] += 1;
        }
        for set in 1..sets {
            ends[set] += ends[set - 1];
        }
        let mut next: Vec<usize> = std::iter::once(0).chain(ends.iter().copied()).collect();
        let mut blocks = vec![0; ends.last().copied().unwrap_or(0)];
        for chunk in std::mem::take(&mut self.chunks) {
            for (block, set) in chunk.taken() {
                blocks[next[set as usize]] = block;
                next[set as usize] += 1;
            }
        }
        BySet { blocks, ends }
    }

    /// The sets that each slot is in.
    pub(crate) fn sets_of_slots(&self) -> Vec<Vec<SetId>> {
        let mut members = Vec::new();
        for (set, words) in &self.sets {
            for slot in words.iter().flat_map(|&word| slots_of(word)) {
                if members.len() <= slot as usize {
                    members.resize_with(slot as usize + 1, Vec::new);
                }
                members[slot as usize].push(*set);
            }
        }
        members
    }

    /// How many copies a slot has of each block of which it has several.
    pub(crate) fn copies(&self, slot: Slot) -> BTreeMap<u64, u32> {
        let more = self.more.get(&slot).into_iter().flatten();
        more.map(|(block, more)| (*block, more.saturating_add(1))).collect()
    }
}

/// Blocks that come together mostly have the same holders: the set that they get is looked for once.
#[derive(Default)]
struct Step {
    before: Option<SetId>,
    after: SetId,
    moved: u32,
}

impl Step {
    /// Counts what was moved; the sets live until then.
    fn end(&self, holders: &mut Holders) {
        let Some(before) = self.before else { return };
        if self.moved > 0 {
            holders.used(self.after, self.moved);
            if before != NOBODY {
                holders.unused(before, self.moved);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_has_every_block_of_every_slot() {
        let mut blocks = Blocks::new(4);
        let owner = blocks.new_owner();
        let slots: Vec<Slot> = (0..70).map(|_| blocks.new_slot(owner, 0, 0)).collect();
        for (at, slot) in slots.iter().enumerate() {
            blocks.store(*slot, (0..1000).filter(|block| block % (at as u64 + 1) == 0));
        }
        blocks.store(slots[1], std::iter::once(2));
        let mut cut = blocks.cut();
        let (by_set, members) = (cut.by_set(), cut.sets_of_slots());
        for (at, slot) in slots.iter().enumerate() {
            let sets = members[*slot as usize].iter();
            let mut found: Vec<u64> = sets.flat_map(|set| by_set.of(*set)).copied().collect();
            found.sort_unstable();
            let expected: Vec<u64> = (0..1000).filter(|block| block % (at as u64 + 1) == 0).collect();
            assert_eq!(found, expected, "slot {at}");
        }
        assert_eq!(cut.copies(slots[1]), BTreeMap::from([(2, 2)]));
        assert!(cut.copies(slots[0]).is_empty());
    }
}
