//! What an index knew, in a file, so that one that starts again need not read all snapshots first. Python's has the same format.
//!
//! A line of JSON (what each cache is, its log, position and digest), then the hashes as 8 little-endian bytes each, then a
//! CRC-32 of all before it. Nothing of it is believed unchecked: bytes by the CRC, each cache by its digest, and the log by the
//! publisher, who refuses a log that is not its own.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::blocks::BlocksCut;
use crate::contents::{Contents, Place};
use crate::groups::CacheGroup;
use crate::holders::Slot;
use crate::index::CacheKey;
use crate::pb;

const MAGIC: &str = "kvgrpc index 1";
const CRC_BYTES: usize = 4;
/// Engines have a few copies of a block, not thousands.
const MOST_COPIES: u32 = 1 << 20;
/// Written at once.
const HASHES_AT_ONCE: usize = 8192;

#[derive(Serialize, Deserialize)]
struct Head {
    magic: String,
    caches: Vec<SavedCache>,
}

/// One cache at one position of its log.
#[derive(Serialize, Deserialize, Clone)]
pub(crate) struct SavedCache {
    engine: String,
    dp: u32,
    pub(crate) log_id: String,
    pub(crate) next_sequence: u64,
    tiers: Vec<(String, u32, u64, u64)>,
    pub(crate) page_tokens: u32,
    groups: BTreeMap<u32, (String, i64, u32)>,
    /// Medium, group, how many blocks, and copies of those with more than one.
    places: Vec<(String, u32, usize, BTreeMap<u64, u32>)>,
    /// Where the hashes of its first place begin.
    #[serde(skip)]
    begin: usize,
}

impl SavedCache {
    /// All but its blocks, which the cut of the table has.
    pub(crate) fn of(key: &CacheKey, log_id: &str, contents: &Contents) -> Self {
        let tiers = contents.digest();
        let tiers = tiers.into_iter().map(|tier| (tier.medium, tier.group, tier.blocks, tier.mixed_hashes));
        let groups = contents.groups.iter();
        Self {
            engine: key.engine.clone(),
            dp: key.dp,
            log_id: log_id.to_owned(),
            next_sequence: contents.next,
            tiers: tiers.collect(),
            page_tokens: contents.page_tokens,
            groups: groups
                .map(|(number, group)| (*number, (group.kind.clone(), group.window, group.page_tokens)))
                .collect(),
            places: Vec::new(),
            begin: 0,
        }
    }

    fn key(&self) -> CacheKey {
        CacheKey { engine: self.engine.clone(), dp: self.dp }
    }

    pub(crate) fn digest(&self) -> Vec<pb::TierDigest> {
        let tier = |(medium, group, blocks, mixed_hashes): &(String, u32, u64, u64)| pb::TierDigest {
            medium: medium.clone(),
            group: *group,
            blocks: *blocks,
            mixed_hashes: *mixed_hashes,
            ..Default::default()
        };
        self.tiers.iter().map(tier).collect()
    }

    pub(crate) fn groups(&self) -> BTreeMap<u32, CacheGroup> {
        let group = |(number, (kind, window, page_tokens)): (&u32, &(String, i64, u32))| {
            (*number, CacheGroup { kind: kind.clone(), window: *window, page_tokens: *page_tokens })
        };
        self.groups.iter().map(group).collect()
    }
}

/// An index at one moment: its caches with the slots of their places, and the table.
pub(crate) struct Cut {
    pub(crate) caches: Vec<(SavedCache, Vec<(Place, Slot)>)>,
    pub(crate) blocks: BlocksCut,
}

/// A file of which all bytes are as they were written.
pub(crate) struct Saved {
    bytes: Vec<u8>,
    caches: HashMap<CacheKey, SavedCache>,
}

impl Saved {
    /// What was written last; none where there is no such file, an error where it cannot be believed.
    pub(crate) fn read(path: &Path) -> io::Result<Option<Self>> {
        match fs::read(path) {
            Ok(bytes) => Self::of(bytes).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn of(bytes: Vec<u8>) -> io::Result<Self> {
        let wrong = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        let (body, crc) = bytes.split_last_chunk::<CRC_BYTES>().ok_or_else(|| wrong("it is too short"))?;
        if crc32fast::hash(body) != u32::from_le_bytes(*crc) {
            return Err(wrong("its checksum is wrong"));
        }
        let end = body.iter().position(|byte| *byte == b'\n').ok_or_else(|| wrong("it has no head"))?;
        let head: Head = serde_json::from_slice(&body[..end])?;
        if head.magic != MAGIC {
            return Err(wrong("it is of another version"));
        }
        let (mut begin, whole, mut caches) = (end + 1, body.len(), HashMap::new());
        for mut cache in head.caches {
            cache.begin = begin;
            for (_, _, count, copies) in &cache.places {
                if copies.values().any(|copies| *copies > MOST_COPIES) {
                    return Err(wrong("a block has too many copies"));
                }
                begin = count.checked_mul(8).and_then(|size| begin.checked_add(size)).unwrap_or(usize::MAX);
            }
            if begin > whole {
                return Err(wrong("it was cut off"));
            }
            caches.insert(cache.key(), cache);
        }
        Ok(Self { bytes, caches })
    }

    pub(crate) fn cache(&self, key: &CacheKey) -> Option<&SavedCache> {
        self.caches.get(key)
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &CacheKey> {
        self.caches.keys()
    }

    /// The blocks of a cache by place, so many at a time; those with several copies come as often.
    pub(crate) fn blocks<'a>(
        &'a self,
        cache: &'a SavedCache,
        most: usize,
    ) -> impl Iterator<Item = (Place, Vec<u64>)> + 'a {
        let mut begin = cache.begin;
        cache.places.iter().flat_map(move |(medium, group, count, copies)| {
            let bytes = &self.bytes[begin..begin + 8 * count];
            begin += bytes.len();
            let place = Place { medium: medium.clone(), group: *group };
            let hash = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
            let once = bytes.chunks(8 * most).map(move |some| some.chunks_exact(8).map(hash).collect::<Vec<u64>>());
            let again = copies.iter().map(|(block, copies)| vec![*block; copies.saturating_sub(1) as usize]);
            once.chain(again).map(move |hashes| (place.clone(), hashes))
        })
    }
}

/// Takes the place of what was there in one step.
pub(crate) fn write(path: &Path, mut cut: Cut) -> io::Result<()> {
    let by_set = cut.blocks.by_set();
    let members = cut.blocks.sets_of_slots();
    let mut parts = Vec::new();
    for (cache, places) in &mut cut.caches {
        for (place, slot) in places {
            let sets = members.get(*slot as usize).map(Vec::as_slice).unwrap_or_default();
            let hashes: Vec<&[u64]> = sets.iter().map(|set| by_set.of(*set)).filter(|some| !some.is_empty()).collect();
            let count = hashes.iter().map(|some| some.len()).sum();
            if count > 0 {
                let copies = cut.blocks.copies(*slot);
                cache.places.push((place.medium.clone(), place.group, count, copies));
                parts.extend(hashes);
            }
        }
    }
    let head = Head { magic: MAGIC.to_owned(), caches: cut.caches.into_iter().map(|(cache, _)| cache).collect() };
    let mut new = PathBuf::from(path).into_os_string();
    new.push(".new");
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    let mut out = Checked { file, crc: crc32fast::Hasher::new() };
    out.write(&[serde_json::to_vec(&head)?.as_slice(), b"\n"].concat())?;
    let mut bytes = Vec::with_capacity(8 * HASHES_AT_ONCE);
    for some in parts.into_iter().flat_map(|part| part.chunks(HASHES_AT_ONCE)) {
        bytes.clear();
        bytes.extend(some.iter().flat_map(|hash| hash.to_le_bytes()));
        out.write(&bytes)?;
    }
    let crc = out.crc.finalize().to_le_bytes();
    out.file.write_all(&crc)?;
    out.file.sync_all()?;
    fs::rename(new, path)
}

struct Checked {
    file: fs::File,
    crc: crc32fast::Hasher,
}

impl Checked {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc.update(bytes);
        self.file.write_all(bytes)
    }
}
