//! Where to run a request, and from whom to pull which part of its prompt: estimates out of what ranks say.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::groups::REACHES;
use crate::index::{CacheKey, Question};
use crate::pb;

/// Of a pair that never exchanged pages, where nobody else did either.
const ASSUMED_BYTES_PER_SECOND: f64 = 1e9;
/// A question, a room and two copies of few pages: assumed, not measured.
const PULL_OVERHEAD_SECONDS: f64 = 0.02;
/// A pull that costs nearly the time that it saves is not worth its risk.
const LEAST_GAIN: f64 = 0.05;
/// What was planned counts until the engine has said what it has to do then: ranks say it each second.
const RESERVED: Duration = Duration::from_millis(1500);
/// Of all that hold a prompt, in pages that a place can take, only the longest are looked at; of one engine fewer: its own ranks
/// pull from others alone.
const SOURCES_LOOKED_AT: usize = 9;
const OF_ONE_ENGINE: usize = 4;
const LONGEST_SECONDS: f64 = 1e9;
const MAX_PULL_RATES: usize = 64;
const MAX_PAGE_FORMS: usize = 8;

/// One request that is to be placed.
#[derive(Debug, Clone, Default)]
pub struct PlanQuestion {
    /// How it begins.
    pub question: Question,
    /// Tokens of all of it; 0: those of its blocks. With `other_kinds` say them: blocks of each kind are others.
    pub tokens: u64,
    /// Engines that could run it; none: all that are followed, of its model.
    pub engines: Vec<String>,
    /// Engines that may lend; none: all.
    pub sources: Vec<String>,
    /// The same beginning as engines of other kinds hash it, for the same model and labels.
    pub other_kinds: Vec<Question>,
}

/// What one cache has of a request.
pub(crate) struct Holding<'a> {
    pub(crate) key: &'a CacheKey,
    /// Leading blocks, by how far one reaches.
    pub(crate) ends: [usize; REACHES],
    /// Leading blocks on the host itself, which it can lend.
    pub(crate) lendable: usize,
    pub(crate) page_tokens: u32,
    /// Of the request.
    pub(crate) blocks: usize,
    pub(crate) load: Option<&'a pb::EngineLoad>,
}

impl Holding<'_> {
    fn anywhere(&self) -> usize {
        self.ends[REACHES - 1]
    }

    fn tokens(&self) -> u64 {
        self.anywhere() as u64 * u64::from(self.page_tokens)
    }
}

/// Of each cache what it has by those hashes of which it has most: of another kind's it has none.
pub(crate) fn keep_most<'a>(held: &mut [Holding<'a>], others: Vec<Holding<'a>>) {
    let mut others: HashMap<&CacheKey, Holding> = others.into_iter().map(|each| (each.key, each)).collect();
    for each in held {
        if let Some(other) = others.remove(each.key).filter(|other| other.tokens() > each.tokens()) {
            *each = other;
        }
    }
}

/// Whatever a rank says, no number is one that cannot be calculated with.
pub(crate) fn calculable(mut load: pb::EngineLoad) -> pb::EngineLoad {
    let rate = |value: f64| if value > 0.0 { value.min(1e18) } else { 0.0 };
    load.prefill_tokens_per_second = rate(load.prefill_tokens_per_second);
    load.pull_rates.truncate(MAX_PULL_RATES);
    load.page_forms.truncate(MAX_PAGE_FORMS);
    for each in &mut load.pull_rates {
        each.bytes_per_second = rate(each.bytes_per_second);
    }
    load
}

/// Remembers what was planned and is not told of yet.
#[derive(Default)]
pub(crate) struct Planner {
    reserved: HashMap<CacheKey, Vec<Reserved>>,
    plans: u64,
}

/// Names one plan among those that reserve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlanId(u64);

struct Reserved {
    plan: PlanId,
    at: Instant,
    tokens: u64,
    pulls: u32,
}

/// What plans gave to caches that they have not told of yet.
#[derive(Default)]
pub(crate) struct Given {
    tokens: HashMap<CacheKey, u64>,
    pulls: HashMap<CacheKey, u32>,
}

impl Planner {
    /// What counts already for the questions of a call.
    pub(crate) fn given(&mut self, now: Instant) -> Given {
        let mut given = Given::default();
        self.reserved.retain(|key, reserved| {
            reserved.retain(|each| now.saturating_duration_since(each.at) < RESERVED);
            for each in reserved.iter() {
                *given.tokens.entry(key.clone()).or_insert(0) += each.tokens;
                *given.pulls.entry(key.clone()).or_insert(0) += each.pulls;
            }
            !reserved.is_empty()
        });
        given
    }

    pub(crate) fn begin(&mut self) -> PlanId {
        self.plans += 1;
        PlanId(self.plans)
    }

    /// Who asked does as this placement says.
    pub(crate) fn reserve(&mut self, plan: PlanId, chosen: &pb::Placement, now: Instant) {
        let mut add = |key, tokens, pulls| {
            self.reserved.entry(key).or_default().push(Reserved { plan, at: now, tokens, pulls });
        };
        add(CacheKey { engine: chosen.engine.clone(), dp: chosen.dp }, chosen.compute_tokens, 0);
        if let Some(pull) = &chosen.pull {
            add(CacheKey { engine: pull.engine.clone(), dp: pull.dp }, 0, 1);
        }
    }

    /// Nobody does as this plan says.
    pub(crate) fn take_back(&mut self, plan: PlanId) {
        self.reserved.retain(|_, reserved| {
            reserved.retain(|each| each.plan != plan);
            !reserved.is_empty()
        });
    }
}

impl Given {
    /// It counts for the next question.
    pub(crate) fn add(&mut self, chosen: &pb::Placement) {
        let key = CacheKey { engine: chosen.engine.clone(), dp: chosen.dp };
        *self.tokens.entry(key).or_insert(0) += chosen.compute_tokens;
        if let Some(pull) = &chosen.pull {
            *self.pulls.entry(CacheKey { engine: pull.engine.clone(), dp: pull.dp }).or_insert(0) += 1;
        }
    }
}

/// Placements of one request, the best first.
pub(crate) fn placements(asked: &PlanQuestion, held: &[Holding], given: &Given) -> Vec<pb::Placement> {
    let loads = || held.iter().filter_map(|each| each.load);
    let typical = median(loads().map(|load| load.prefill_tokens_per_second)).unwrap_or(0.0);
    let rates = loads().flat_map(|load| load.pull_rates.iter().map(|each| each.bytes_per_second));
    let usual = median(rates).unwrap_or(ASSUMED_BYTES_PER_SECOND);
    let may_lend =
        |each: &&Holding| each.lendable > 0 && (asked.sources.is_empty() || asked.sources.contains(&each.key.engine));
    let mut sources: Vec<&Holding> = held.iter().filter(may_lend).collect();
    sources.sort_by_key(|each| Reverse(each.lendable as u64 * u64::from(each.page_tokens)));
    let mut looked_at = SourcesByTaker::default();
    let may_run = |each: &&Holding| asked.engines.is_empty() || asked.engines.contains(&each.key.engine);
    let places =
        held.iter().filter(may_run).map(|at| place(asked, at, looked_at.of(at.load, &sources), given, typical, usual));
    let mut places: Vec<(Option<f64>, pb::Placement)> = places.collect();
    places.sort_by(|(a, at), (b, other)| {
        let soonest = |seconds: &Option<f64>| seconds.unwrap_or(f64::INFINITY);
        soonest(a).total_cmp(&soonest(b)).then_with(|| worth(at).cmp(&worth(other)))
    });
    places.into_iter().map(|(_, placement)| placement).collect()
}

/// For each sort of pages the few sources that are worth a look: only such as pages can be taken of.
#[derive(Default)]
struct SourcesByTaker<'a>(HashMap<(u32, u64, &'a [u64]), Vec<&'a Holding<'a>>>);

impl<'a> SourcesByTaker<'a> {
    /// Of `sources`, the longest first.
    fn of(&mut self, taker: Option<&'a pb::EngineLoad>, sources: &[&'a Holding<'a>]) -> &[&'a Holding<'a>] {
        let Some(taker) = taker else { return &[] };
        let found =
            self.0.entry((taker.page_tokens, taker.page_bytes, taker.page_forms.as_slice())).or_insert_with(|| {
                let mut of_engine: HashMap<&str, usize> = HashMap::new();
                let fit = sources.iter().filter(|each| each.load.is_some_and(|load| exchange(taker, load)));
                let few = fit.filter(|each| {
                    let known = of_engine.entry(each.key.engine.as_str()).or_default();
                    *known += 1;
                    *known <= OF_ONE_ENGINE
                });
                few.take(SOURCES_LOOKED_AT).copied().collect()
            });
        found
    }
}

/// Of those of which nothing is known those with most of the prompt come first, then those with least to do.
fn worth(at: &pb::Placement) -> (Reverse<u64>, u64, &str, u32) {
    let waiting = at.load.as_ref().map_or(0, |load| load.waiting_tokens);
    (Reverse(u64::from(at.blocks) * u64::from(at.page_tokens)), waiting, &at.engine, at.dp)
}

/// The placement, and when its first token comes, in seconds; None: not known.
fn place(
    asked: &PlanQuestion,
    at: &Holding,
    sources: &[&Holding],
    given: &Given,
    typical: f64,
    usual: f64,
) -> (Option<f64>, pb::Placement) {
    let said = at.load.map_or(0.0, |load| load.prefill_tokens_per_second);
    let speed = if said > 0.0 { said } else { typical };
    let page = u64::from(at.page_tokens);
    // The prompt may be hashed by other pages than this cache has: its hashes are no measure of it then.
    let tokens = if asked.tokens > 0 { asked.tokens } else { at.blocks as u64 * page };
    let without = tokens.saturating_sub(at.anywhere() as u64 * page);
    let mut placement = pb::Placement {
        engine: at.key.engine.clone(),
        dp: at.key.dp,
        device_blocks: at.ends[0] as u32,
        host_blocks: at.ends[1] as u32,
        blocks: at.anywhere() as u32,
        page_tokens: at.page_tokens,
        compute_tokens: without,
        load: at.load.cloned(),
        ..Default::default()
    };
    if speed <= 0.0 {
        return (None, placement);
    }
    let waiting = at.load.map_or(0, |load| load.waiting_tokens) + given.tokens.get(at.key).copied().unwrap_or(0);
    let queue = waiting as f64 / speed;
    let alone = queue + without as f64 / speed;
    let mut first_token = alone;
    for source in sources {
        let Some(pull) = pull(at, source, given, usual) else { continue };
        let left = tokens.saturating_sub(u64::from(pull.host_blocks) * page);
        let taken = seconds_of(&pull);
        // It waits for its turn anyway; pages come meanwhile.
        let seconds = queue.max(taken) + left as f64 / speed;
        let saved = (u64::from(pull.blocks) * page) as f64 / speed;
        if seconds < first_token.min(alone - LEAST_GAIN * saved) {
            (first_token, placement.compute_tokens, placement.pull) = (seconds, left, Some(pull));
        }
    }
    placement.queue_time = Some(to_pb(queue));
    placement.compute_time = Some(to_pb(placement.compute_tokens as f64 / speed));
    placement.first_token_time = Some(to_pb(first_token));
    placement.first_token_time_without_pull = Some(to_pb(alone));
    placement.speed_assumed = said <= 0.0;
    (Some(first_token), placement)
}

/// None where the source has nothing more, or blocks do not fill its pages.
fn pull(at: &Holding, source: &Holding, given: &Given, usual: f64) -> Option<pb::PlannedPull> {
    let (load, lends) = (at.load?, source.load?);
    let (page, block) = (u64::from(load.page_tokens), u64::from(at.page_tokens));
    if source.key.engine == at.key.engine || block == 0 || !page.is_multiple_of(block) {
        return None;
    }
    let lent = source.lendable as u64 * u64::from(source.page_tokens) / page * page;
    let lacking = lent.checked_sub(at.tokens()).filter(|tokens| *tokens > 0)?;
    let rates = load.pull_rates.iter().rev().find(|rate| rate.engine == source.key.engine);
    let measured = rates.map_or(0.0, |rate| rate.bytes_per_second);
    let in_flight = lends.lent_pulls.saturating_add(given.pulls.get(source.key).copied().unwrap_or(0));
    let mut pull = pb::PlannedPull {
        engine: source.key.engine.clone(),
        dp: source.key.dp,
        host_blocks: (lent / block) as u32,
        blocks: (lacking / block) as u32,
        bytes: lacking.div_ceil(page).saturating_mul(load.page_bytes),
        bytes_per_second: if measured > 0.0 { measured } else { usual },
        measured: measured > 0.0,
        pulls_in_flight: in_flight,
        time: None,
    };
    pull.time = Some(to_pb(seconds_of(&pull)));
    Some(pull)
}

/// Whether pages of one are of use to the other.
fn exchange(taker: &pb::EngineLoad, holder: &pb::EngineLoad) -> bool {
    if taker.page_bytes == 0 || taker.page_tokens == 0 || taker.page_tokens != holder.page_tokens {
        return false;
    }
    if taker.page_forms.is_empty() || holder.page_forms.is_empty() {
        return taker.page_bytes == holder.page_bytes;
    }
    taker.page_forms.iter().any(|form| holder.page_forms.contains(form))
}

fn seconds_of(pull: &pb::PlannedPull) -> f64 {
    PULL_OVERHEAD_SECONDS + pull.bytes as f64 * (1.0 + f64::from(pull.pulls_in_flight)) / pull.bytes_per_second
}

/// Of those above 0.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut known: Vec<f64> = values.filter(|value| *value > 0.0).collect();
    known.sort_by(f64::total_cmp);
    let middle = known.len() / 2;
    match known.len() {
        0 => None,
        count if count % 2 == 1 => Some(known[middle]),
        _ => Some(known[middle - 1].midpoint(known[middle])),
    }
}

fn to_pb(seconds: f64) -> prost_types::Duration {
    let micros = (seconds.min(LONGEST_SECONDS) * 1e6).round_ties_even() as i64;
    prost_types::Duration { seconds: micros / 1_000_000, nanos: (micros % 1_000_000 * 1_000) as i32 }
}
