//! What goes on between commands: a watch of engines, and a follower with its cache.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use kvgrpc::pb::{Engine, WatchEnginesRequest, WatchEnginesResponse};
use kvgrpc::{BlockHash, Cache, Cause, Dialer, EventFollower, Item, Place, Registry, Stream};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::{lines, LOOK};

const PAUSE: Duration = Duration::from_millis(100);

/// What a watch of engines has told: the newest of each engine.
pub struct Watched {
    told: Arc<Mutex<Told>>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Told {
    engines: HashMap<String, Engine>,
    complete: bool,
}

impl Watched {
    pub fn begin(registry: Registry) -> Self {
        let told = Arc::new(Mutex::new(Told::default()));
        let hears = told.clone();
        let task = tokio::spawn(async move {
            loop {
                if let Ok(mut watch) = registry.watch_engines(WatchEnginesRequest::default()).await {
                    while let Ok(Some(message)) = watch.next().await {
                        hears.lock().hear(message);
                    }
                }
                tokio::time::sleep(PAUSE).await;
            }
        });
        Self { told, task }
    }

    pub async fn until_engine(&self, name: &str, ranks: u32) -> String {
        loop {
            {
                let told = self.told.lock();
                let engine = told.engines.get(name);
                if told.complete && engine.map_or(0, |engine| engine.registered_ranks) == ranks {
                    return engine.filter(|_| ranks > 0).map_or_else(|| format!("{name} gone"), lines::head);
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Told {
    fn hear(&mut self, message: WatchEnginesResponse) {
        if message.state_begins {
            *self = Self::default();
        }
        for engine in message.changes.into_iter().filter_map(|change| change.engine) {
            self.engines.insert(engine.name.clone(), engine);
        }
        self.complete |= message.state_complete;
    }
}

/// A follower, and what its items told.
pub struct Followed {
    heard: Arc<Mutex<Heard>>,
    questions: mpsc::Sender<Question>,
    task: JoinHandle<()>,
}

/// Whether a block is in a place: the cache belongs to the task that follows.
type Question = (Place, BlockHash, oneshot::Sender<bool>);

#[derive(Default)]
struct Heard {
    /// All batches before it are in; the publisher has those before `upcoming`.
    next: u64,
    upcoming: u64,
    exact: bool,
    contents: String,
    logs: HashSet<String>,
    snapshots: u32,
    different: u32,
    failures: u32,
    told: u32,
}

impl Followed {
    pub fn begin(dialer: Dialer) -> Self {
        let heard = Arc::new(Mutex::new(Heard::default()));
        let (questions, mut asked) = mpsc::channel::<Question>(1);
        let hears = heard.clone();
        let task = tokio::spawn(async move {
            let mut follower = EventFollower::new(dialer, Stream::default());
            loop {
                tokio::select! {
                    item = follower.next() => hears.lock().hear(&item, follower.cache()),
                    Some((place, hash, answer)) = asked.recv() => {
                        let _ = answer.send(follower.cache().holds(&place, &hash));
                    }
                }
            }
        });
        Self { heard, questions, task }
    }

    pub async fn until_current(&self, next: u64) -> String {
        self.once(|heard| heard.exact && heard.next == next && heard.upcoming <= next).await
    }

    pub async fn until_failed(&self) -> String {
        format!("failed {}", self.once(|heard| heard.failures > heard.told).await)
    }

    pub fn counts(&self) -> String {
        let heard = self.heard.lock();
        format!("snapshots={} logs={} different={}", heard.snapshots, heard.logs.len(), heard.different)
    }

    pub async fn holds(&self, medium: &str, hash: u64) -> String {
        let (answer, answered) = oneshot::channel();
        let question = (Place::new(medium, 0), BlockHash::Value(hash), answer);
        self.questions.send(question).await.expect("it follows without end");
        answered.await.expect("it follows without end").to_string()
    }

    /// The contents at the moment at which the condition is met.
    async fn once(&self, condition: impl Fn(&Heard) -> bool) -> String {
        loop {
            {
                let mut heard = self.heard.lock();
                if condition(&heard) {
                    heard.told = heard.failures;
                    return heard.contents.clone();
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Heard {
    fn hear(&mut self, item: &Item, cache: &Cache) {
        match item {
            Item::Void(_) => self.exact = false,
            Item::Reset { log_id, .. } => {
                self.exact = false;
                self.snapshots += 1;
                self.logs.insert(log_id.clone());
            }
            Item::Events { next_sequence, complete, .. } => (self.exact, self.next) = (*complete, *next_sequence),
            Item::Current { next_sequence, lag, .. } => self.upcoming = next_sequence + lag,
            Item::Failed { cause, .. } => {
                self.failures += 1;
                self.different += u32::from(matches!(cause, Cause::Differs));
            }
        }
        self.contents = contents(self.next, cache);
    }
}

fn contents(next: u64, cache: &Cache) -> String {
    let mut counts = BTreeMap::new();
    for (place, blocks) in cache.blocks() {
        *counts.entry(place.medium).or_insert(0) += blocks;
    }
    let blocks = lines::joined(counts.iter().map(|(medium, blocks)| format!("{medium}:{blocks}")), ",");
    format!("next={next} blocks={blocks} whole={} doubtful={}", cache.whole(), cache.doubtful())
}
