//! Blocks with the sets that hold them, in the order in which they came: whoever goes through a prompt mostly finds the next block
//! behind the one before it, and looks for the others by their hashes.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::holders::{SetId, NOBODY};

/// Where a block lies.
pub(crate) type Position = u32;

/// So many entries are taken, and swept, at a time: by bits.
const CHUNK_BITS: u32 = 12;
const CHUNK: usize = 1 << CHUNK_BITS;

pub(crate) struct Entries {
    chunks: Vec<Chunk>,
    /// Positions by the hashes of their blocks, in parts of which none takes long to grow.
    parts: Vec<HashTable<Position>>,
    hasher: DefaultHashBuilder,
    /// Positions without a block. Those that are taken next are behind each other, as far as can be.
    free: Vec<Position>,
}

/// Entries whose set is NOBODY are free.
#[derive(Clone, Default)]
pub(crate) struct Chunk {
    keys: Vec<u64>,
    sets: Vec<SetId>,
}

impl Chunk {
    /// Its blocks with their sets.
    pub(crate) fn taken(&self) -> impl Iterator<Item = (u64, SetId)> + '_ {
        let all = self.keys.iter().copied().zip(self.sets.iter().copied());
        all.filter(|(_, set)| *set != NOBODY)
    }
}

impl Entries {
    /// With 2^`bits` parts.
    pub(crate) fn new(bits: u32) -> Self {
        Self {
            chunks: Vec::new(),
            parts: (0..1 << bits).map(|_| HashTable::new()).collect(),
            hasher: DefaultHashBuilder::default(),
            free: Vec::new(),
        }
    }

    pub(crate) fn len(&self) -> u64 {
        self.parts.iter().map(|part| part.len() as u64).sum()
    }

    pub(crate) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Begins to go through blocks that mostly came in this order.
    #[inline]
    pub(crate) fn walk(&self) -> Walk<'_> {
        Walk { entries: self, next: 0 }
    }

    /// Where a block is. `next`: where it lies, if it came behind the one before it.
    #[inline]
    pub(crate) fn find(&self, key: u64, next: Position) -> Option<Position> {
        let (chunk, at) = place_of(next);
        if let Some(chunk) = self.chunks.get(chunk) {
            if chunk.keys.get(at) == Some(&key) && chunk.sets[at] != NOBODY {
                return Some(next);
            }
        }
        let hash = self.hasher.hash_one(key);
        self.parts[self.part_of(hash)].find(hash, |position| self.key(*position) == key).copied()
    }

    #[inline]
    pub(crate) fn set(&self, position: Position) -> SetId {
        let (chunk, at) = place_of(position);
        self.chunks[chunk].sets[at]
    }

    /// Gives a block another set. With NOBODY it is to be taken out by `remove`.
    pub(crate) fn change(&mut self, position: Position, set: SetId) {
        let (chunk, at) = place_of(position);
        self.chunks[chunk].sets[at] = set;
    }

    /// Takes a block that is not here, with a set that is not NOBODY.
    pub(crate) fn insert(&mut self, key: u64, set: SetId) -> Position {
        let position = self.free.pop().unwrap_or_else(|| self.append());
        let (chunk, at) = place_of(position);
        (self.chunks[chunk].keys[at], self.chunks[chunk].sets[at]) = (key, set);
        let hash = self.hasher.hash_one(key);
        let part = self.part_of(hash);
        let (chunks, hasher) = (&self.chunks, &self.hasher);
        self.parts[part].insert_unique(hash, position, |position| hasher.hash_one(key_in(chunks, *position)));
        position
    }

    /// Takes blocks out, each once; `positions` is empty afterwards.
    pub(crate) fn remove(&mut self, positions: &mut Vec<Position>) {
        for position in &*positions {
            self.forget(*position);
        }
        positions.sort_unstable_by(|a, b| b.cmp(a));
        self.free.append(positions);
    }

    /// Gives the blocks of one chunk other sets; those that get NOBODY are taken out. False: there is no such chunk.
    pub(crate) fn sweep(&mut self, chunk: usize, mut after: impl FnMut(SetId) -> SetId) -> bool {
        let Some(swept) = self.chunks.get_mut(chunk) else { return false };
        let mut gone = Vec::new();
        for (at, set) in swept.sets.iter_mut().enumerate().filter(|(_, set)| **set != NOBODY) {
            match after(*set) {
                NOBODY => gone.push(((chunk << CHUNK_BITS) | at) as Position),
                other => *set = other,
            }
        }
        self.remove(&mut gone);
        true
    }

    fn forget(&mut self, position: Position) {
        let hash = self.hasher.hash_one(self.key(position));
        let part = self.part_of(hash);
        if let Ok(found) = self.parts[part].find_entry(hash, |other| *other == position) {
            found.remove();
        }
        self.change(position, NOBODY);
    }

    fn append(&mut self) -> Position {
        if self.chunks.last().is_none_or(|last| last.keys.len() == CHUNK) {
            self.chunks.push(Chunk::default());
        }
        let chunk = self.chunks.len() - 1;
        let last = &mut self.chunks[chunk];
        last.keys.push(0);
        last.sets.push(NOBODY);
        ((chunk << CHUNK_BITS) | (last.keys.len() - 1)) as Position
    }

    #[inline]
    fn key(&self, position: Position) -> u64 {
        key_in(&self.chunks, position)
    }

    /// By bits that the table of the part does not use.
    #[inline]
    fn part_of(&self, hash: u64) -> usize {
        (hash >> 40) as usize & (self.parts.len() - 1)
    }
}

/// Goes through blocks one after the other.
pub(crate) struct Walk<'a> {
    entries: &'a Entries,
    next: Position,
}

/// So many blocks are compared without a branch between.
const AT_A_TIME: usize = 8;

impl Walk<'_> {
    /// The set that holds the first of these blocks, and how many of them, it included, lie behind each other with that set.
    #[inline]
    pub(crate) fn run(&mut self, keys: &[u64]) -> (SetId, usize) {
        let Some(position) = keys.first().and_then(|key| self.entries.find(*key, self.next)) else {
            return (NOBODY, 1);
        };
        let (chunk, at) = place_of(position);
        let Chunk { keys: own, sets } = &self.entries.chunks[chunk];
        let count = alike(&own[at..], &sets[at..], keys);
        self.next = position + count as Position;
        (sets[at], count)
    }

    /// The set that holds the next block.
    #[inline]
    pub(crate) fn set_of(&mut self, key: u64) -> SetId {
        match self.entries.find(key, self.next) {
            Some(position) => {
                self.next = position + 1;
                self.entries.set(position)
            }
            None => NOBODY,
        }
    }
}

/// How many of the first blocks are those that are asked for, and have the set of the first one.
fn alike(own: &[u64], sets: &[SetId], asked: &[u64]) -> usize {
    let set = sets[0];
    let (ours, theirs) = (own.chunks_exact(AT_A_TIME).zip(sets.chunks_exact(AT_A_TIME)), asked.chunks_exact(AT_A_TIME));
    let are_alike = |((own, sets), asked): &((&[u64], &[SetId]), &[u64])| {
        let differs = |at: usize| (own[at] ^ asked[at]) | u64::from(sets[at] ^ set);
        (0..AT_A_TIME).fold(0, |found, at| found | differs(at)) == 0
    };
    let begin = AT_A_TIME * ours.zip(theirs).take_while(are_alike).count();
    let rest = own[begin..].iter().zip(&sets[begin..]).zip(&asked[begin..]);
    begin + rest.take_while(|((own, own_set), asked)| own == asked && **own_set == set).count()
}

#[inline]
fn place_of(position: Position) -> (usize, usize) {
    ((position >> CHUNK_BITS) as usize, position as usize & (CHUNK - 1))
}

#[inline]
fn key_in(chunks: &[Chunk], position: Position) -> u64 {
    let (chunk, at) = place_of(position);
    chunks[chunk].keys[at]
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// Whatever comes and goes, in whatever order it is looked for.
    #[test]
    fn a_block_is_found_with_its_set_behind_the_one_before_it_or_not() {
        let (mut entries, mut expected) = (Entries::new(2), HashMap::<u64, SetId>::new());
        let mut random = fastrand::Rng::with_seed(7);
        for round in 0..2_000_u32 {
            let begin = random.u64(..12_000);
            let run: Vec<u64> = (begin..begin + random.u64(1..40)).collect();
            if random.u32(..3) == 0 {
                let mut gone: Vec<Position> = run.iter().filter_map(|key| entries.find(*key, 0)).collect();
                entries.remove(&mut gone);
                expected.retain(|key, _| !run.contains(key));
                continue;
            }
            for key in run {
                match entries.find(key, random.u32(..20_000)) {
                    Some(position) => entries.change(position, round + 1),
                    None => drop(entries.insert(key, round + 1)),
                }
                expected.insert(key, round + 1);
            }
        }
        for chunk in 0.. {
            if !entries.sweep(chunk, |set| if set % 5 == 0 { NOBODY } else { set }) {
                break;
            }
        }
        expected.retain(|_, set| *set % 5 != 0);
        let mut walk = entries.walk();
        assert!((0..13_000).all(|key| walk.set_of(key) == expected.get(&key).copied().unwrap_or(NOBODY)));
        for first in 0..13_000 {
            let run: Vec<u64> = (first..first + random.u64(1..40)).collect();
            let (set, count) = entries.walk().run(&run);
            assert!(
                (1..=run.len()).contains(&count) && run[..count].iter().all(|key| entries.walk().set_of(*key) == set)
            );
        }
        let told: HashMap<u64, SetId> = entries.chunks().iter().flat_map(Chunk::taken).collect();
        assert_eq!((entries.len(), told), (expected.len() as u64, expected));
    }

    #[test]
    fn a_run_ends_where_the_set_changes_or_another_block_lies() {
        let mut entries = Entries::new(0);
        let keys: Vec<u64> = (0..40).collect();
        let positions: Vec<Position> = keys.iter().map(|key| entries.insert(*key, 1)).collect();
        entries.change(positions[19], 2);
        let runs = |entries: &Entries, keys: &[u64]| {
            let (mut walk, mut at, mut found) = (entries.walk(), 0, Vec::new());
            while at < keys.len() {
                let run = walk.run(&keys[at..]);
                found.push(run);
                at += run.1;
            }
            found
        };
        assert_eq!(runs(&entries, &keys), [(1, 19), (2, 1), (1, 20)]);
        assert_eq!(runs(&entries, &[0, 1, 2, 30, 31, 77, 32]), [(1, 3), (1, 2), (NOBODY, 1), (1, 1)]);
    }

    #[test]
    fn blocks_that_come_where_others_went_lie_behind_each_other() {
        let mut entries = Entries::new(0);
        let mut gone: Vec<Position> = (0..8).map(|key| entries.insert(key, 1)).rev().collect();
        entries.remove(&mut gone);
        let positions: Vec<Position> = (10..18).map(|key| entries.insert(key, 1)).collect();
        assert_eq!(positions, (0..8).collect::<Vec<_>>());
    }
}
