//! Who holds the beginning of a request, over the caches of many engines, in process.

mod discovery;
mod engines;
mod file;
mod followed;
mod planning;
mod saved;
mod table;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::JoinHandle;

use crate::index::discovery::{begin, Shared};
use crate::index::planning::{keep_most, placements, Given, PlanId, Planner};
use crate::pb::{self, IndexSourceState as State};
use crate::{Dialer, Error};

pub use crate::index::planning::PlanQuestion;
pub(crate) use crate::index::saved::SavedCache;

/// How a process is dialled, by its address: `Dialer::new` with your credentials.
pub type Dial = Arc<dyn Fn(&str) -> Result<Dialer, Error> + Send + Sync>;

/// What an index follows, and how it dials.
pub struct IndexOptions {
    /// Replicas of one registry: where one does not answer, the next is asked. Every engine whose events it says are served is
    /// followed, as they come and go.
    pub registries: Vec<String>,
    /// Ranks that are followed besides, by the addresses of their gRPC.
    pub sources: Vec<String>,
    /// Dials a registry or a rank.
    pub dial: Dial,
    /// A file where what is known is written each five minutes and by `save`, and from which a start goes on, for each cache
    /// whose log goes on. It names blocks of prompts: its owner alone may read it.
    pub saved: Option<PathBuf>,
}

/// The beginning of one request.
#[derive(Debug, Clone, Default)]
pub struct Question {
    /// The hashes of its blocks, in order: `BlockHash::key` of what events carry.
    pub hashes: Vec<u64>,
    /// Its hashes for caches whose blocks have so many tokens, where several page sizes are followed; `hashes` are for the
    /// others.
    pub chains: BTreeMap<u32, Vec<u64>>,
    /// How many tokens lie from hash to hash of `hashes`; 0: a block.
    pub step_tokens: u32,
    /// What engines run, by ModelIdentity.name at the registry; empty: any, if all that are asked run one.
    pub model: String,
    /// Only caches of ranks that have all of these labels at the registry; none: of any.
    pub labels: HashMap<String, String>,
}

/// Which caches are told, and what of each.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// The only engines that are told; none: all.
    pub engines: Vec<String>,
    /// How many scores are told, the best; 0: all.
    pub most: usize,
    /// How fresh each is.
    pub freshness: bool,
    /// Leaves out caches that were not known to be exact at most so long ago.
    pub max_staleness: Option<Duration>,
}

/// A question named no model, and the caches which were asked are of several: hashes do not tell them apart.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Question.model is empty, and these caches are of several models: name one of {models:?}")]
pub struct ModelNeeded {
    /// Their models.
    pub models: Vec<String>,
}

/// Some of the caches that an index follows, and how all of them stand.
#[derive(Debug, Clone, Default)]
pub struct SourcesPage {
    /// By engine and dp.
    pub sources: Vec<pb::IndexSource>,
    /// There are more behind these.
    pub more: bool,
    /// How many of all are in which state.
    pub counts: BTreeMap<i32, u32>,
    /// Batches that are known to be missing, of all.
    pub lag_batches: u64,
}

/// Names one cache.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct CacheKey {
    pub(crate) engine: String,
    pub(crate) dp: u32,
}

impl fmt::Display for CacheKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} dp{}", self.engine, self.dp)
    }
}

/// Where a cache is asked for, and what the registry says of its rank; "": not known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CachePlace {
    pub(crate) address: String,
    pub(crate) model: String,
    pub(crate) labels: HashMap<String, String>,
}

impl CachePlace {
    /// Whether a question is about what runs there.
    pub(crate) fn is_asked(&self, question: &Question) -> bool {
        (question.model.is_empty() || self.model == question.model)
            && question.labels.iter().all(|(name, value)| self.labels.get(name) == Some(value))
    }
}

/// Who holds the beginning of a request, over the caches of many engines: the same answers as IndexService.
///
/// An engine that the registry does not list any more is followed as long as it answers: a registry's silence proves nothing.
/// What cannot be followed, `not_followed` says. Dropping it ends all followers.
pub struct PrefixIndex {
    shared: Arc<Shared>,
    planner: Mutex<Planner>,
    task: JoinHandle<()>,
}

impl PrefixIndex {
    /// Begins to follow, on the tokio runtime that this is called in.
    pub fn new(options: IndexOptions) -> Result<Self, Error> {
        let addresses = options.registries.iter().chain(&options.sources);
        for address in addresses {
            crate::target_of(address).ok_or_else(|| Error::Address(address.clone()))?;
        }
        if options.registries.is_empty() && options.sources.is_empty() {
            return Err(Error::NothingToFollow);
        }
        let shared = Shared::new(options);
        let task = tokio::spawn(begin(shared.clone()));
        Ok(Self { shared, planner: Mutex::default(), task })
    }

    /// Whether it still looks for caches.
    pub fn is_healthy(&self) -> bool {
        !self.task.is_finished()
    }

    /// Writes what is known to the file that was named for it, within so long; `not_followed` says why it could not. Keeps the
    /// file as it is while some of what it says is not known again: two minutes after the start, that is given up.
    pub async fn save(&self, within: Duration) {
        self.shared.save(within).await;
    }

    /// The caches that hold the first block, those with most tokens first, then those with most of it on the device, then by
    /// engine and dp.
    pub fn score(&self, question: &Question, wanted: &Wanted) -> Result<Vec<pb::CacheScore>, ModelNeeded> {
        self.shared.table.read().score(question, wanted, Instant::now())
    }

    /// Where to run each request, the best first, and from whom to pull which part of its prompt. What a plan gives an engine
    /// counts for the next question; with `reserve` for other calls too, until the engine has told what it has to do then.
    pub fn plan(
        &self,
        questions: &[PlanQuestion],
        max_staleness: Option<Duration>,
        reserve: bool,
    ) -> Result<Vec<Vec<pb::Placement>>, ModelNeeded> {
        let mut planning = self.begin_plan(max_staleness, reserve);
        let plans = questions.iter().map(|asked| planning.place(asked)).collect::<Result<_, _>>()?;
        planning.keep();
        Ok(plans)
    }

    /// The same, request after request: for whoever leaves time to others between.
    pub fn begin_plan(&self, max_staleness: Option<Duration>, reserve: bool) -> Planning<'_> {
        let (now, mut planner) = (Instant::now(), self.planner.lock());
        let (given, reserved) = (planner.given(now), reserve.then(|| planner.begin()));
        Planning { index: self, now, max_staleness, given, reserved }
    }

    /// All caches that are followed, by engine and dp.
    pub fn sources(&self) -> Vec<pb::IndexSource> {
        let now = Instant::now();
        self.shared.table.read().all().map(|followed| followed.source(now)).collect()
    }

    /// Those behind a cache (none: from the first on) in one of these states (none: in any), at most so many.
    pub fn sources_behind(&self, after: Option<(&str, u32)>, states: &[State], most: usize) -> SourcesPage {
        let now = Instant::now();
        self.shared.table.read().page(after, states, most, now)
    }

    /// What cannot be followed now, each with its reason: "ENGINE: why", "ADDRESS: why".
    pub fn not_followed(&self) -> Vec<String> {
        self.shared.not_followed()
    }

    /// Different blocks that somebody holds; for some time after a cache emptied, more.
    pub fn blocks(&self) -> u64 {
        self.shared.table.read().blocks()
    }

    /// How many caches are current, and how many are followed.
    pub fn standing(&self) -> (usize, usize) {
        let table = self.shared.table.read();
        let current = table.all().filter(|followed| followed.state() == State::Current).count();
        (current, table.all().count())
    }

    /// Whether it has looked once wherever it was told that caches are.
    pub fn has_looked(&self) -> bool {
        self.shared.has_looked()
    }

    /// Waits until so many caches are current.
    pub async fn until_current(&self, caches: usize) {
        while self.standing().0 < caches {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// A plan that is made, request after request. Dropped before it was kept it leaves nothing reserved.
pub struct Planning<'a> {
    index: &'a PrefixIndex,
    now: Instant,
    max_staleness: Option<Duration>,
    given: Given,
    reserved: Option<PlanId>,
}

impl Planning<'_> {
    /// Where to run the next request, the best first. What this gives an engine counts for the one after it.
    pub fn place(&mut self, asked: &PlanQuestion) -> Result<Vec<pb::Placement>, ModelNeeded> {
        let table = self.index.shared.table.read();
        let mut held = table.holdings(&asked.question, self.max_staleness, self.now)?;
        for other in &asked.other_kinds {
            keep_most(&mut held, table.holdings(other, self.max_staleness, self.now)?);
        }
        let found = placements(asked, &held, &self.given);
        drop(table);
        if let Some(best) = found.first() {
            self.given.add(best);
            if let Some(plan) = self.reserved {
                self.index.planner.lock().reserve(plan, best, self.now);
            }
        }
        Ok(found)
    }

    /// Whoever asked has the whole plan, and does as it says.
    pub fn keep(mut self) {
        self.reserved = None;
    }
}

impl Drop for Planning<'_> {
    fn drop(&mut self) {
        if let Some(plan) = self.reserved {
            self.index.planner.lock().take_back(plan);
        }
    }
}

impl Drop for PrefixIndex {
    fn drop(&mut self) {
        self.task.abort();
        self.shared.stop();
    }
}
