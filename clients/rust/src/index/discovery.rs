//! How an index finds the caches that it follows: at registries, and by the addresses that it was given.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};

use crate::batch::Event;
use crate::connections::Connections;
use crate::follower::Publisher;
use crate::index::engines::EngineMirror;
use crate::index::file;
use crate::index::followed::Followed;
use crate::index::saved::{self, Saved, SavedCache};
use crate::index::table::Table;
use crate::index::{CacheKey, CachePlace, IndexOptions};
use crate::pb::event_service_client::EventServiceClient;
use crate::pb::registry_service_client::RegistryServiceClient;
use crate::pb::{self, IndexSourceState, WatchResponse};
use crate::repeat::Pages;
use crate::silence::heard_within;
use crate::watch::{Item, Listener, Stream, Watcher};
use crate::{Dialer, Error, Refusal, Verdict};

/// Sources that were named are asked who they are so often, and engines that went are looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// A registry says something each 5 s.
const REGISTRY_IDLE: Duration = Duration::from_secs(15);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// An index without what it knew is better than none.
const READ_WITHIN: Duration = Duration::from_secs(30);
const SAVE_INTERVAL: Duration = Duration::from_secs(300);
/// What was saved of engines that do not come back.
const SAVED_KEPT: Duration = Duration::from_secs(120);
const SAVED: &str = "saved file";
/// Of one source: nobody publishes as many.
const MOST_STREAM_PAGES: usize = 100;
/// A part of each is in memory until all of it came.
const SNAPSHOTS_AT_ONCE: usize = 16;
/// Of a snapshot, taken in one step: others have their turn between.
const SLICE_BLOCKS: usize = 2048;

pub(crate) struct Shared {
    pub(crate) table: RwLock<Table>,
    directory: Mutex<Directory>,
    options: IndexOptions,
    connections: Arc<Connections>,
    turns: Arc<Semaphore>,
}

struct Directory {
    mirror: EngineMirror,
    following: HashMap<CacheKey, (CachePlace, AbortHandle)>,
    /// Of each engine at the registry: where its caches are.
    listed: BTreeMap<String, HashMap<CacheKey, CachePlace>>,
    gone: HashSet<CacheKey>,
    /// The sources that were named have been asked.
    asked: bool,
    /// Of caches that may be found again.
    saved: Option<Arc<Saved>>,
    /// Of these it is not known again yet what was saved.
    not_restored: HashSet<CacheKey>,
    /// What was saved is read, or can't be.
    read: bool,
    /// What is not followed, by what it is about.
    lacking: BTreeMap<String, String>,
}

impl Shared {
    pub(crate) fn new(options: IndexOptions) -> Arc<Self> {
        let directory = Directory {
            mirror: EngineMirror::new(),
            following: HashMap::new(),
            listed: BTreeMap::new(),
            gone: HashSet::new(),
            asked: false,
            saved: None,
            not_restored: HashSet::new(),
            read: options.saved.is_none(),
            lacking: BTreeMap::new(),
        };
        let table = RwLock::new(Table::new());
        let (connections, turns) = (Arc::default(), Arc::new(Semaphore::new(SNAPSHOTS_AT_ONCE)));
        Arc::new(Self { table, directory: Mutex::new(directory), options, connections, turns })
    }

    /// What cannot be followed now, each with its reason.
    pub(crate) fn not_followed(&self) -> Vec<String> {
        self.directory.lock().lacking.iter().map(|(what, why)| format!("{what}: {why}")).collect()
    }

    /// Whether it has looked wherever caches may be, once.
    pub(crate) fn has_looked(&self) -> bool {
        let directory = self.directory.lock();
        directory.asked && (self.options.registries.is_empty() || directory.mirror.complete)
    }

    pub(crate) fn stop(&self) {
        for (_, (_, task)) in self.directory.lock().following.drain() {
            task.abort();
        }
    }

    /// Writes what is known, where a file was named for it; why not is told as what is not followed is. What is not all known
    /// again would take the place of all that was, and so would nothing, as long as the registry is away: the older file is of
    /// more use.
    pub(crate) async fn save(&self, within: Duration) {
        let Some(path) = self.options.saved.clone() else { return };
        if self.is_restoring() || self.directory.lock().following.is_empty() {
            return;
        }
        let cut = self.table.read().cut(Instant::now());
        match file::on_a_thread(within, move || saved::write(&path, cut)).await {
            Ok(()) => drop(self.directory.lock().lacking.remove(SAVED)),
            Err(why) => self.lack(SAVED, format!("the index is not saved: {why}")),
        }
    }

    fn is_restoring(&self) -> bool {
        let directory = self.directory.lock();
        !directory.read || !directory.not_restored.is_empty()
    }

    /// What was saved, as far as it can be believed.
    fn take_saved(&self, saved: Option<Saved>) {
        let mut directory = self.directory.lock();
        directory.not_restored = saved.iter().flat_map(Saved::keys).cloned().collect();
        (directory.saved, directory.read) = (saved.map(Arc::new), true);
    }

    /// What did not come back is not waited for any longer.
    pub(crate) fn forget_saved(&self) {
        let mut directory = self.directory.lock();
        directory.saved = None;
        directory.not_restored.clear();
    }

    fn dial(&self, address: &str) -> Result<Dialer, Error> {
        (self.options.dial)(address)
    }

    fn lack(&self, what: &str, why: impl ToString) {
        self.directory.lock().lacking.insert(what.to_owned(), why.to_string());
    }
}

/// Reads what was saved, then looks for caches without end.
pub(crate) async fn begin(shared: Arc<Shared>) {
    let began = Instant::now();
    if let Some(path) = shared.options.saved.clone() {
        let read = file::on_a_thread(READ_WITHIN, move || Saved::read(&path)).await;
        let saved = read.unwrap_or_else(|why| {
            shared.lack(SAVED, format!("all snapshots are taken anew: {why}"));
            None
        });
        shared.take_saved(saved);
    }
    let saving = async {
        if shared.options.saved.is_some() {
            tokio::time::sleep_until((began + SAVED_KEPT).into()).await;
            shared.forget_saved();
            loop {
                tokio::time::sleep(SAVE_INTERVAL).await;
                shared.save(SAVE_INTERVAL).await;
            }
        }
    };
    let watching = async {
        if !shared.options.registries.is_empty() {
            watch_engines(shared.clone()).await;
        }
    };
    tokio::join!(look(shared.clone()), watching, saving);
}

/// What a registry says, of several replicas the next when one does not answer. Followers that it leads to live on.
async fn watch_engines(shared: Arc<Shared>) {
    let (mut pause, mut at) = (FIRST_PAUSE, 0);
    loop {
        let (address, began) = (&shared.options.registries[at % shared.options.registries.len()], Instant::now());
        let why = watch_registry(&shared, address).await;
        shared.lack(address, why);
        if began.elapsed() > LONGEST_PAUSE {
            pause = FIRST_PAUSE;
        }
        tokio::time::sleep(pause / 2 + (pause / 2).mul_f64(fastrand::f64())).await;
        pause = (2 * pause).min(LONGEST_PAUSE);
        at += 1;
    }
}

/// Follows the engines of one registry; why it ended.
async fn watch_registry(shared: &Arc<Shared>, address: &str) -> String {
    let silent = || format!("the registry said nothing for {} s", REGISTRY_IDLE.as_secs());
    let dialer = match shared.dial(address) {
        Ok(dialer) => dialer,
        Err(error) => return error.to_string(),
    };
    let mut client = RegistryServiceClient::new(dialer.channel());
    let request = pb::WatchEnginesRequest { without_pools: true, ..Default::default() };
    let mut call = match heard_within(REGISTRY_IDLE, client.watch_engines(request)).await {
        Some(Ok(call)) => call.into_inner(),
        Some(Err(status)) => return Refusal::from(status).to_string(),
        None => return silent(),
    };
    loop {
        match heard_within(REGISTRY_IDLE, call.message()).await {
            Some(Ok(Some(message))) => shared.hear_registry(address, message),
            Some(Ok(None)) => return "the registry ended the call".to_owned(),
            Some(Err(status)) => return Refusal::from(status).to_string(),
            None => return silent(),
        }
    }
}

/// Asks the sources that were named who they are, and ends what is gone.
async fn look(shared: Arc<Shared>) {
    loop {
        let mut asking = JoinSet::new();
        for address in shared.unknown_sources() {
            let shared = shared.clone();
            asking.spawn(async move { shared.ask_source(&address).await });
        }
        asking.join_all().await;
        shared.directory.lock().asked = true;
        shared.let_go();
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

impl Shared {
    pub(crate) fn hear_registry(self: &Arc<Self>, address: &str, message: pb::WatchEnginesResponse) {
        let mut directory = self.directory.lock();
        directory.lacking.remove(address);
        for name in directory.mirror.apply(message) {
            self.engine_changed(&mut directory, &name);
        }
    }

    fn engine_changed(self: &Arc<Self>, directory: &mut Directory, name: &str) {
        let before = directory.listed.remove(name).unwrap_or_default();
        let about_it = format!("{name} dp");
        directory.lacking.retain(|about, _| about != name && !about.starts_with(&about_it));
        let mut now = HashMap::new();
        if let Some(engine) = directory.mirror.engines.get(name) {
            let model = engine.head.model.clone().unwrap_or_default().name;
            let mut lacking = Vec::new();
            for (dp, row) in engine.publishers() {
                let key = CacheKey { engine: name.to_owned(), dp };
                let address = row.endpoints.clone().unwrap_or_default().grpc;
                if address.is_empty() {
                    lacking.push((key.to_string(), "it serves events, and its row names no gRPC address".to_owned()));
                } else {
                    now.insert(key, CachePlace { address, model: model.clone(), labels: row.labels.clone() });
                }
            }
            let (ranks, missing) = (engine.head.registered_ranks, &engine.head.dp_lacking_events);
            if now.is_empty() {
                lacking.push((name.to_owned(), format!("none of its {ranks} registered ranks serves events")));
            } else if !missing.is_empty() {
                let which = first_of(missing);
                lacking.push((name.to_owned(), format!("dp ranks {which} serve no events, others of it do")));
            }
            directory.lacking.extend(lacking);
            directory.listed.insert(name.to_owned(), now.clone());
        }
        directory.gone.extend(before.into_keys().filter(|key| !now.contains_key(key)));
        directory.gone.retain(|key| !now.contains_key(key));
        self.follow(directory, now);
    }

    fn unknown_sources(&self) -> BTreeSet<String> {
        let directory = self.directory.lock();
        let known: HashSet<&String> = directory.following.values().map(|(place, _)| &place.address).collect();
        self.options.sources.iter().filter(|address| !known.contains(address)).cloned().collect()
    }

    async fn ask_source(self: &Arc<Self>, address: &str) {
        let found = self.streams_of(address).await;
        let mut directory = self.directory.lock();
        match found {
            Ok(places) if places.is_empty() => {
                directory.lacking.insert(address.to_owned(), "it serves no stream of events".to_owned());
            }
            Ok(places) => {
                directory.lacking.remove(address);
                self.follow(&mut directory, places);
            }
            Err(why) => drop(directory.lacking.insert(address.to_owned(), why)),
        }
    }

    async fn streams_of(&self, address: &str) -> Result<HashMap<CacheKey, CachePlace>, String> {
        let mut client = EventServiceClient::new(self.dial(address).map_err(|error| error.to_string())?.channel());
        let mut places = HashMap::new();
        let mut request = pb::ListStreamsRequest { page_size: 1000, ..Default::default() };
        let (end, mut pages) = (tokio::time::Instant::now() + ANSWER_WITHIN, Pages::default());
        for _ in 0..MOST_STREAM_PAGES {
            let answer = tokio::time::timeout_at(end, client.list_streams(request.clone())).await;
            let page = answer
                .map_err(|_| format!("no answer within {} s", ANSWER_WITHIN.as_secs()))?
                .map_err(|status| Refusal::from(status).to_string())?
                .into_inner();
            for stream in page.streams {
                let key = CacheKey { engine: stream.engine, dp: stream.dp };
                places.insert(key, CachePlace { address: address.to_owned(), ..CachePlace::default() });
            }
            if !pages.go_on(&page.next_page_token).map_err(|refusal| refusal.to_string())? {
                return Ok(places);
            }
            request.page_token = page.next_page_token;
        }
        Err(format!("it lists more than {MOST_STREAM_PAGES} pages of streams"))
    }

    fn follow(self: &Arc<Self>, directory: &mut Directory, places: HashMap<CacheKey, CachePlace>) {
        for (key, place) in places {
            if directory.following.get(&key).is_some_and(|(known, _)| *known == place) {
                continue;
            }
            self.unfollow(directory, &key);
            let dialer = match self.dial(&place.address) {
                Ok(dialer) => dialer,
                Err(error) => {
                    directory.lacking.insert(key.to_string(), error.to_string());
                    continue;
                }
            };
            directory.lacking.remove(&key.to_string());
            let stream = Stream { engine: key.engine.clone(), dp: key.dp, typed: false };
            let cache = self.table.write().add(key.clone(), place.clone());
            let listening = Listening { shared: self.clone(), cache, key: key.clone() };
            let saved = directory.saved.clone();
            let publisher = Publisher::sharing(dialer, self.connections.clone());
            let mut watcher = Watcher::new(publisher, listening, stream).without_tokens().in_turn(self.turns.clone());
            let task = tokio::spawn(async move {
                if let Some(saved) = saved {
                    go_on_from(&saved, &mut watcher).await;
                }
                loop {
                    watcher.next().await;
                    tokio::task::yield_now().await;
                }
            });
            directory.following.insert(key, (place, task.abort_handle()));
        }
    }

    fn unfollow(&self, directory: &mut Directory, key: &CacheKey) {
        if let Some((_, task)) = directory.following.remove(key) {
            task.abort();
            self.table.write().remove(key);
        }
    }

    /// Ends what a registry lists no more and does not answer either; what could not be begun is tried again.
    fn let_go(self: &Arc<Self>) {
        let mut directory = self.directory.lock();
        for key in directory.gone.clone() {
            let is_named =
                directory.following.get(&key).map(|(place, _)| self.options.sources.contains(&place.address));
            let is_away = self.table.read().get(&key).is_none_or(|known| known.state() == IndexSourceState::Connecting);
            match is_named {
                _ if directory.mirror.warming_up => {}
                None | Some(true) => drop(directory.gone.remove(&key)),
                Some(false) if is_away => {
                    directory.gone.remove(&key);
                    self.unfollow(&mut directory, &key);
                }
                Some(false) => {}
            }
        }
        let listed = directory.listed.values().flatten();
        let missing = listed.filter(|(key, _)| !directory.following.contains_key(key));
        let missing = missing.map(|(key, place)| (key.clone(), place.clone())).collect();
        self.follow(&mut directory, missing);
    }
}

/// What was saved of the cache is shown, and its log read from there.
async fn go_on_from(saved: &Saved, watcher: &mut Watcher<Publisher, Listening>) {
    let Some(cache) = saved.cache(&watcher.listener.key) else { return };
    if watcher.listener.restore(saved, cache).await {
        watcher.resume(&cache.log_id, cache.next_sequence);
    }
    let listener = &watcher.listener;
    listener.shared.directory.lock().not_restored.remove(&listener.key);
}

fn first_of(dp_ranks: &[u32]) -> String {
    const SHOWN: usize = 8;
    let mut words: Vec<String> = dp_ranks.iter().take(SHOWN).map(u32::to_string).collect();
    if dp_ranks.len() > SHOWN {
        words.push("...".to_owned());
    }
    words.join(", ")
}

/// Tells the table what one follower hears.
struct Listening {
    shared: Arc<Shared>,
    cache: u32,
    key: CacheKey,
}

impl Listener for Listening {
    fn hear(&mut self, item: &mut Item) -> Verdict {
        self.hear_ahead(item);
        self.shared.table.write().hear(self.cache, &self.key, item, Instant::now())
    }

    fn called(&mut self) {
        self.shared.table.write().with(self.cache, &self.key, |followed, blocks| followed.called(blocks));
    }

    fn came(&mut self, message: &WatchResponse) {
        let now = Instant::now();
        self.shared.table.write().with(self.cache, &self.key, |followed, _| followed.came(message, now));
    }
}

impl Listening {
    /// Takes what was saved of it, in slices; whether it is all.
    async fn restore(&self, saved: &Saved, cache: &SavedCache) -> bool {
        self.shared.table.write().with(self.cache, &self.key, Followed::restore);
        for (place, hashes) in saved.blocks(cache, SLICE_BLOCKS) {
            self.shared.table.write().with(self.cache, &self.key, |followed, blocks| {
                if let Some(shadow) = &mut followed.kept.shadow {
                    shadow.store(blocks, place, hashes.into_iter());
                }
            });
            tokio::task::yield_now().await;
        }
        let is_whole =
            self.shared.table.write().with(self.cache, &self.key, |followed, blocks| followed.restored(blocks, cache));
        is_whole == Some(true)
    }

    /// Takes the events of a snapshot in slices: nobody looks at what comes of them before it is complete.
    fn hear_ahead(&self, item: &mut Item) {
        let Item::Events { events, .. } = item else { return };
        let (mut begin, mut blocks) = (0, 0);
        for end in 1..=events.len() {
            blocks += blocks_of(&events[end - 1]);
            if blocks < SLICE_BLOCKS {
                continue;
            }
            let mut is_taken = false;
            self.shared.table.write().with(self.cache, &self.key, |followed, blocks| {
                if let Some(shadow) = &mut followed.kept.shadow {
                    shadow.apply(blocks, &events[begin..end]);
                    is_taken = true;
                }
            });
            if !is_taken {
                return;
            }
            (begin, blocks) = (end, 0);
        }
        events.drain(..begin);
    }
}

fn blocks_of(event: &Event) -> usize {
    match event {
        Event::BlockStored(stored) => stored.hashes.len(),
        Event::BlockRemoved(removed) => removed.hashes.len(),
        _ => 0,
    }
}
