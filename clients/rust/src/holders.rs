//! Sets of slots, each kept once whoever refers to it: a block that many caches hold costs a number.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

/// A place in which blocks lie: one tier and group of one cache.
pub(crate) type Slot = u32;
/// A set of slots, by its number.
pub(crate) type SetId = u32;
/// Nobody.
pub(crate) const NOBODY: SetId = 0;

/// Bits of slots by words of 64, without those that are 0, in order.
type Words = Box<[(u32, u64)]>;

struct Set {
    words: Words,
    /// How many blocks have it.
    uses: u32,
}

/// All sets that some block has.
pub(crate) struct Holders {
    sets: Vec<Set>,
    free: Vec<SetId>,
    numbers: HashTable<SetId>,
    hasher: DefaultHashBuilder,
    scratch: Vec<(u32, u64)>,
}

impl Holders {
    pub(crate) fn new() -> Self {
        let nobody = Set { words: Words::default(), uses: 1 };
        Self {
            sets: vec![nobody],
            free: Vec::new(),
            numbers: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            scratch: Vec::new(),
        }
    }

    #[cfg(test)]
    pub(crate) fn sets_ever(&self) -> usize {
        self.sets.len()
    }

    pub(crate) fn has(&self, set: SetId, slot: Slot) -> bool {
        let words = &self.sets[set as usize].words;
        let (word, bit) = place_of(slot);
        words.binary_search_by_key(&word, |(word, _)| *word).is_ok_and(|at| words[at].1 & bit != 0)
    }

    pub(crate) fn slots(&self, set: SetId) -> impl Iterator<Item = Slot> + '_ {
        self.sets[set as usize].words.iter().flat_map(|&word| slots_of(word))
    }

    /// Every set that some block has, with its number.
    pub(crate) fn all(&self) -> impl Iterator<Item = (SetId, &[(u32, u64)])> {
        let sets = self.sets.iter().enumerate().filter(|(_, set)| set.uses > 0);
        sets.map(|(number, set)| (number as SetId, &*set.words))
    }

    /// The number of a set with the slot besides; nobody uses it yet.
    pub(crate) fn with(&mut self, set: SetId, slot: Slot) -> SetId {
        let (word, bit) = place_of(slot);
        self.scratch.clear();
        self.scratch.extend_from_slice(&self.sets[set as usize].words);
        match self.scratch.binary_search_by_key(&word, |(word, _)| *word) {
            Ok(at) => self.scratch[at].1 |= bit,
            Err(at) => self.scratch.insert(at, (word, bit)),
        }
        self.number_of_scratch()
    }

    /// The number of a set without the slots whose bits are in the mask; nobody uses it yet.
    pub(crate) fn without(&mut self, set: SetId, is_out: impl Fn(u32) -> u64) -> SetId {
        let words = &self.sets[set as usize].words;
        if words.iter().all(|&(word, bits)| bits & is_out(word) == 0) {
            return set;
        }
        self.scratch.clear();
        for &(word, bits) in words {
            let left = bits & !is_out(word);
            if left != 0 {
                self.scratch.push((word, left));
            }
        }
        self.number_of_scratch()
    }

    pub(crate) fn used(&mut self, set: SetId, more: u32) {
        self.sets[set as usize].uses += more;
    }

    /// Some blocks have it no more. A set without uses is forgotten.
    pub(crate) fn unused(&mut self, set: SetId, less: u32) {
        self.sets[set as usize].uses -= less;
        if self.sets[set as usize].uses > 0 || set == NOBODY {
            return;
        }
        let words = std::mem::take(&mut self.sets[set as usize].words);
        if let Ok(found) = self.numbers.find_entry(self.hasher.hash_one(&words), |number| *number == set) {
            found.remove();
        }
        self.free.push(set);
    }

    fn number_of_scratch(&mut self) -> SetId {
        if self.scratch.is_empty() {
            return NOBODY;
        }
        let hash = self.hasher.hash_one(self.scratch.as_slice());
        if let Some(&number) = self.numbers.find(hash, |number| *self.sets[*number as usize].words == *self.scratch) {
            return number;
        }
        let set = Set { words: self.scratch.as_slice().into(), uses: 0 };
        let number = match self.free.pop() {
            Some(number) => {
                self.sets[number as usize] = set;
                number
            }
            None => {
                self.sets.push(set);
                (self.sets.len() - 1) as SetId
            }
        };
        let (sets, hasher) = (&self.sets, &self.hasher);
        self.numbers.insert_unique(hash, number, |number| hasher.hash_one(&sets[*number as usize].words));
        number
    }
}

pub(crate) fn place_of(slot: Slot) -> (u32, u64) {
    (slot / 64, 1 << (slot % 64))
}

pub(crate) fn slots_of((word, bits): (u32, u64)) -> impl Iterator<Item = Slot> {
    Bits(bits).map(move |bit| word * 64 + bit)
}

struct Bits(u64);

impl Iterator for Bits {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        if self.0 == 0 {
            return None;
        }
        let lowest = self.0.trailing_zeros();
        self.0 &= self.0 - 1;
        Some(lowest)
    }
}
