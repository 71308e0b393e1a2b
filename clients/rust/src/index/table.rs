//! The caches that are followed over one table of blocks, and what is asked of them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::blocks::{Blocks, Owner};
use crate::groups::{HOST, NOWHERE, REACHES};
use crate::holders::{SetId, NOBODY};
use crate::index::followed::Followed;
use crate::index::planning::Holding;
use crate::index::saved::Cut;
use crate::index::{CacheKey, CachePlace, ModelNeeded, Question, SourcesPage, Wanted};
use crate::pb::{self, IndexSourceState as State};
use crate::watch::Item;
use crate::Verdict;

/// Parts of the table of blocks, by bits: of millions of blocks none has more than some thousands.
const PART_BITS: u32 = 10;
const NONE: u32 = u32::MAX;
/// For so many caches that hold the beginning of a prompt there is room at first.
const AT_ONCE: usize = 64;
/// Of a cache that is not asked about.
const NOT_ASKED: u8 = u8::MAX;

type CacheId = u32;

pub(crate) struct Table {
    blocks: Blocks,
    caches: Vec<Option<Followed>>,
    free: Vec<CacheId>,
    by_key: BTreeMap<CacheKey, CacheId>,
    /// Of each cache, how many come before it by engine and dp; told anew when that changed and is asked for.
    ranks: OnceLock<Vec<u32>>,
    /// Whose what is shown is: none of a snapshot that is not complete.
    by_owner: Vec<CacheId>,
    /// How many caches run a model.
    models: HashMap<String, u32>,
}

/// What one question finds of one cache: its leading blocks by how far one reaches.
struct Found {
    cache: CacheId,
    ends: [usize; REACHES],
    /// The nearest reach whose end is not known yet.
    longest: usize,
}

impl Table {
    pub(crate) fn new() -> Self {
        Self {
            blocks: Blocks::new(PART_BITS),
            caches: Vec::new(),
            free: Vec::new(),
            by_key: BTreeMap::new(),
            ranks: OnceLock::new(),
            by_owner: Vec::new(),
            models: HashMap::new(),
        }
    }

    pub(crate) fn add(&mut self, key: CacheKey, place: CachePlace) -> CacheId {
        self.remove(&key);
        if !place.model.is_empty() {
            *self.models.entry(place.model.clone()).or_insert(0) += 1;
        }
        let followed = Some(Followed::new(&mut self.blocks, key.clone(), place));
        let cache = match self.free.pop() {
            Some(cache) => {
                self.caches[cache as usize] = followed;
                cache
            }
            None => {
                self.caches.push(followed);
                (self.caches.len() - 1) as CacheId
            }
        };
        self.by_key.insert(key, cache);
        self.ranks.take();
        self.show(cache);
        cache
    }

    pub(crate) fn remove(&mut self, key: &CacheKey) {
        let Some(cache) = self.by_key.remove(key) else { return };
        self.ranks.take();
        let Some(followed) = self.caches[cache as usize].take() else { return };
        if let Some(count) = self.models.get_mut(&followed.place.model) {
            *count -= 1;
            if *count == 0 {
                self.models.remove(&followed.place.model);
            }
        }
        self.by_owner[followed.kept.contents.owner as usize] = NONE;
        followed.kept.drop_from(&mut self.blocks);
        self.free.push(cache);
    }

    pub(crate) fn get(&self, key: &CacheKey) -> Option<&Followed> {
        self.by_key.get(key).and_then(|cache| self.caches[*cache as usize].as_ref())
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Followed> {
        self.by_key.values().filter_map(|cache| self.caches[*cache as usize].as_ref())
    }

    pub(crate) fn page(&self, after: Option<(&str, u32)>, states: &[State], most: usize, now: Instant) -> SourcesPage {
        let mut page = SourcesPage::default();
        for followed in self.all() {
            let state = followed.state();
            *page.counts.entry(state.into()).or_insert(0) += 1;
            page.lag_batches = page.lag_batches.saturating_add(followed.lag());
            let is_behind = after.is_none_or(|after| (followed.key.engine.as_str(), followed.key.dp) > after);
            if is_behind && (states.is_empty() || states.contains(&state)) {
                page.more = page.sources.len() >= most;
                if !page.more {
                    page.sources.push(followed.source(now));
                }
            }
        }
        page
    }

    /// Blocks that somebody holds; for some time after a cache emptied, more.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.len()
    }

    /// Tells a cache that is there still: what comes late of one that was removed is passed over.
    pub(crate) fn with<T>(
        &mut self,
        cache: CacheId,
        key: &CacheKey,
        tell: impl FnOnce(&mut Followed, &mut Blocks) -> T,
    ) -> Option<T> {
        let followed = self.caches[cache as usize].as_mut().filter(|followed| followed.key == *key)?;
        let before = followed.kept.contents.owner;
        let told = tell(followed, &mut self.blocks);
        if followed.kept.contents.owner != before {
            self.by_owner[before as usize] = NONE;
            self.show(cache);
        }
        Some(told)
    }

    pub(crate) fn hear(&mut self, cache: CacheId, key: &CacheKey, item: &Item, now: Instant) -> Verdict {
        let verdict = self.with(cache, key, |followed, blocks| followed.hear(blocks, item, now));
        verdict.unwrap_or(Verdict::Unknown)
    }

    /// All of it that may be known again later, as it is now.
    pub(crate) fn cut(&self, now: Instant) -> Cut {
        Cut { caches: self.all().filter_map(|followed| followed.saved(now)).collect(), blocks: self.blocks.cut() }
    }

    fn show(&mut self, cache: CacheId) {
        let Some(followed) = &self.caches[cache as usize] else { return };
        let owner = followed.kept.contents.owner as usize;
        if self.by_owner.len() <= owner {
            self.by_owner.resize(owner + 1, NONE);
        }
        self.by_owner[owner] = cache;
    }

    fn cache_of(&self, owner: Owner) -> CacheId {
        self.by_owner.get(owner as usize).copied().unwrap_or(NONE)
    }

    /// The caches that hold the first block, those with most tokens first, then those with most of it on the device, then by
    /// engine and dp.
    pub(crate) fn score(
        &self,
        question: &Question,
        wanted: &Wanted,
        now: Instant,
    ) -> Result<Vec<pb::CacheScore>, ModelNeeded> {
        self.check_model(question, wanted)?;
        let is_asked = |followed: &Followed| {
            followed.place.is_asked(question)
                && (wanted.engines.is_empty() || wanted.engines.contains(&followed.key.engine))
                && followed.is_shown(now)
                && wanted.max_staleness.is_none_or(|most| followed.is_exact_within(most, now))
        };
        let mut scores: Vec<(Found, &Followed)> = Vec::with_capacity(AT_ONCE);
        if question.chains.is_empty() && question.step_tokens == 0 {
            self.found(&question.hashes, 1, 0, is_asked, &mut scores);
        } else {
            for (size, hashes, stride, step) in self.classes(question) {
                let is_asked = |followed: &Followed| followed.kept.contents.page_tokens == size && is_asked(followed);
                self.found(hashes, stride, step, is_asked, &mut scores);
            }
        }
        let ranks = self.ranks.get_or_init(|| self.ranked());
        let worth = |(at, (found, followed)): (usize, &(Found, &Followed))| {
            let tokens = found.ends[REACHES - 1] as u64 * u64::from(followed.kept.contents.page_tokens.max(1));
            (Reverse(tokens), Reverse(found.ends[0]), ranks[found.cache as usize], at)
        };
        let mut order: Vec<_> = scores.iter().enumerate().map(worth).collect();
        if wanted.most > 0 && wanted.most < order.len() {
            order.select_nth_unstable(wanted.most);
            order.truncate(wanted.most);
        }
        order.sort_unstable();
        let told = order.iter().map(|(.., at)| &scores[*at]);
        Ok(told.map(|(found, followed)| to_score(found, followed, wanted.freshness, now)).collect())
    }

    fn ranked(&self) -> Vec<u32> {
        let mut ranks = vec![0; self.caches.len()];
        for (rank, cache) in self.by_key.values().enumerate() {
            ranks[*cache as usize] = rank as u32;
        }
        ranks
    }

    /// What each cache that answers has of a request, those that have nothing too: nobody is sent to, nor pulls from, one that
    /// does not.
    pub(crate) fn holdings(
        &self,
        question: &Question,
        max_staleness: Option<Duration>,
        now: Instant,
    ) -> Result<Vec<Holding<'_>>, ModelNeeded> {
        self.check_model(question, &Wanted::default())?;
        let mut by_size: BTreeMap<u32, Vec<&Followed>> = BTreeMap::new();
        for followed in self.all().filter(|followed| {
            followed.place.is_asked(question)
                && followed.is_shown(now)
                && followed.state() != State::Connecting
                && max_staleness.is_none_or(|most| followed.is_exact_within(most, now))
        }) {
            let told = followed.load.as_ref().map_or(0, |load| load.page_tokens);
            let size = [followed.kept.contents.page_tokens, told].into_iter().find(|size| *size > 0).unwrap_or(0);
            by_size.entry(size).or_default().push(followed);
        }
        // One that has told of no block yet has those of the others, where these agree.
        if by_size.len() == 2 {
            if let Some(mut unknown) = by_size.remove(&0) {
                by_size.values_mut().for_each(|known| known.append(&mut unknown));
            }
        }
        let mut held = Vec::new();
        for (size, caches) in by_size {
            let (hashes, stride, step) = chain_of(question, size).unwrap_or((&[], 1, 0));
            let asked: HashSet<*const Followed> = caches.iter().copied().map(std::ptr::from_ref).collect();
            let is_asked = |followed: &Followed| asked.contains(&std::ptr::from_ref(followed));
            let mut scores = Vec::new();
            self.found(hashes, stride, step, is_asked, &mut scores);
            let mut ends: HashMap<&CacheKey, [usize; REACHES]> =
                scores.iter().map(|(found, followed)| (&followed.key, found.ends)).collect();
            let mut walk = self.blocks.walk();
            let sets: Vec<SetId> = strided(hashes, stride).map(|hash| walk.set_of(*hash)).collect();
            for followed in caches {
                let ends = ends.remove(&followed.key).unwrap_or_default();
                let lendable = followed.kept.contents.on_host(&self.blocks, &sets).min(ends[HOST]);
                let (key, load, blocks) = (&followed.key, followed.load.as_ref(), sets.len());
                held.push(Holding { key, ends, lendable, page_tokens: size, blocks, load });
            }
        }
        Ok(held)
    }

    /// Hashes do not tell models apart.
    fn check_model(&self, question: &Question, wanted: &Wanted) -> Result<(), ModelNeeded> {
        if !question.model.is_empty() || self.models.len() < 2 {
            return Ok(());
        }
        let is_asked = |followed: &&Followed| {
            followed.place.is_asked(question)
                && (wanted.engines.is_empty() || wanted.engines.contains(&followed.key.engine))
        };
        let mut models: Vec<String> =
            self.all().filter(is_asked).map(|followed| followed.place.model.clone()).collect();
        models.sort();
        models.dedup();
        models.retain(|model| !model.is_empty());
        if models.len() > 1 {
            return Err(ModelNeeded { models });
        }
        Ok(())
    }

    /// For caches of each page size the hashes that fit them, every how many is a block, and their step.
    fn classes<'a>(&self, question: &'a Question) -> Vec<(u32, &'a [u64], usize, u32)> {
        let mut sizes: Vec<u32> = self.all().map(|followed| followed.kept.contents.page_tokens).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let fitting = |size: u32| chain_of(question, size).map(|(hashes, stride, step)| (size, hashes, stride, step));
        sizes.into_iter().filter_map(fitting).collect()
    }

    fn found<'a>(
        &'a self,
        hashes: &[u64],
        stride: usize,
        step: u32,
        is_asked: impl Fn(&Followed) -> bool,
        scores: &mut Vec<(Found, &'a Followed)>,
    ) {
        for mut found in self.leading(hashes, stride, is_asked) {
            let Some(followed) = &self.caches[found.cache as usize] else { continue };
            found.ends = followed.kept.contents.of_use(&self.blocks, found.ends, hashes, step);
            if found.ends[REACHES - 1] > 0 {
                scores.push((found, followed));
            }
        }
    }

    /// Of each cache that is asked and holds the first block, how many of the leading ones. Block i has hash (i+1)*stride-1.
    fn leading(&self, hashes: &[u64], stride: usize, is_asked: impl Fn(&Followed) -> bool) -> Vec<Found> {
        let (mut ended, mut alive) = (Vec::with_capacity(AT_ONCE), Vec::with_capacity(AT_ONCE));
        let mut nearest = vec![NOWHERE as u8; self.caches.len()];
        let (mut before, mut end, mut walk) = (NOBODY, 0, self.blocks.walk());
        while end < hashes.len() / stride {
            let (set, count) = match stride {
                1 => walk.run(&hashes[end..]),
                _ => (walk.set_of(hashes[(end + 1) * stride - 1]), 1),
            };
            if set != before || end == 0 {
                before = set;
                for slot in self.blocks.holders().slots(set) {
                    let state = self.blocks.slot(slot);
                    let cache = if state.is_prefix { self.cache_of(state.owner) } else { NONE };
                    if cache == NONE || nearest[cache as usize] == NOT_ASKED {
                        continue;
                    }
                    let near = &mut nearest[cache as usize];
                    if end == 0 && *near == NOWHERE as u8 {
                        if !self.caches[cache as usize].as_ref().is_some_and(&is_asked) {
                            *near = NOT_ASKED;
                            continue;
                        }
                        alive.push(Found { cache, ends: [0; REACHES], longest: 0 });
                    }
                    *near = state.reach.min(*near);
                }
                alive.retain_mut(|found: &mut Found| {
                    let near = usize::from(std::mem::replace(&mut nearest[found.cache as usize], NOWHERE as u8));
                    while found.longest < near {
                        found.ends[found.longest] = end;
                        found.longest += 1;
                    }
                    if found.longest == NOWHERE {
                        ended.push(Found { ..*found });
                    }
                    found.longest < NOWHERE
                });
                if alive.is_empty() {
                    return ended;
                }
            }
            end += count;
        }
        for mut found in alive {
            found.ends[found.longest..].fill(end);
            ended.push(found);
        }
        ended
    }
}

/// The hashes that fit caches of one page size, every how many is a block, and how many tokens lie between two (0: a block).
fn chain_of(question: &Question, size: u32) -> Option<(&[u64], usize, u32)> {
    if let Some(chain) = question.chains.get(&size) {
        return Some((chain, 1, 0));
    }
    let between = [question.step_tokens, size, 1].into_iter().find(|tokens| *tokens > 0).unwrap_or(1);
    let stride = (size / between).max(1) as usize;
    size.is_multiple_of(between).then_some((question.hashes.as_slice(), stride, question.step_tokens))
}

/// Those of the blocks: of block i hash (i+1)*stride-1.
fn strided(hashes: &[u64], stride: usize) -> impl Iterator<Item = &u64> {
    hashes.iter().skip(stride - 1).step_by(stride)
}

fn to_score(found: &Found, followed: &Followed, with_freshness: bool, now: Instant) -> pb::CacheScore {
    let [device_blocks, host_blocks, disk_blocks, blocks] = found.ends.map(|end| end as u32);
    pb::CacheScore {
        engine: followed.key.engine.clone(),
        dp: followed.key.dp,
        device_blocks,
        host_blocks,
        disk_blocks,
        blocks,
        page_tokens: followed.kept.contents.page_tokens,
        freshness: with_freshness.then(|| followed.freshness(now)),
    }
}

pub(crate) fn duration_to_pb(duration: Duration) -> prost_types::Duration {
    prost_types::Duration { seconds: duration.as_secs() as i64, nanos: duration.subsec_nanos() as i32 }
}
