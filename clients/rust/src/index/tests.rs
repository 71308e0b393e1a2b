//! How fresh what is told of a cache is, what a registry's messages lead to, what is planned, and what is saved.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

use crate::index::discovery::{begin as look_for_caches, Shared};
use crate::index::engines::EngineMirror;
use crate::index::followed::HIDE_AFTER;
use crate::index::planning::{keep_most, placements, Given, Holding};
use crate::index::table::Table;
use crate::index::{saved, CacheKey, CachePlace, IndexOptions, PlanQuestion, PrefixIndex, Question, Wanted};
use crate::pb::{self, watch_response::Kind, IndexSourceState as State, WatchResponse};
use crate::watch::{Cause, Item};
use crate::{BlockHash, BlockStored, Dialer, Event, Options};

fn begin(log: &str, next_sequence: u64) -> WatchResponse {
    let stream = Some(pb::EventStream { log_id: log.into(), next_sequence, ..Default::default() });
    WatchResponse { kind: Some(Kind::Begin(pb::WatchBegin { stream, first_sequence: next_sequence })) }
}

fn stored(hashes: &[u64], medium: &str, block_size: i64) -> Event {
    let hashes = hashes.iter().copied().map(BlockHash::Value).collect();
    Event::BlockStored(BlockStored { hashes, medium: medium.into(), block_size, ..Default::default() })
}

fn events(log: &str, next_sequence: u64, events: Vec<Event>, complete: bool) -> Item {
    Item::Events { log_id: log.into(), next_sequence, events, complete, state: None }
}

struct World {
    table: Table,
    now: Instant,
}

impl World {
    fn new() -> Self {
        Self { table: Table::new(), now: Instant::now() }
    }

    fn add(&mut self, engine: &str, model: &str) -> (u32, CacheKey) {
        let key = CacheKey { engine: engine.into(), dp: 0 };
        let place = CachePlace { model: model.into(), ..CachePlace::default() };
        (self.table.add(key.clone(), place), key)
    }

    /// One that holds blocks of log "a" before sequence 3.
    fn known(&mut self, engine: &str, model: &str, told: Vec<Event>) -> (u32, CacheKey) {
        let (cache, key) = self.add(engine, model);
        self.came(&(cache, key.clone()), begin("a", 3));
        self.hear(&(cache, key.clone()), Item::Reset { log_id: "a".into(), whole: true });
        self.hear(&(cache, key.clone()), events("a", 3, told, true));
        (cache, key)
    }

    fn came(&mut self, (cache, key): &(u32, CacheKey), message: WatchResponse) {
        let now = self.now;
        self.table.with(*cache, key, |followed, _| followed.came(&message, now));
    }

    fn hear(&mut self, (cache, key): &(u32, CacheKey), item: Item) {
        self.table.hear(*cache, key, &item, self.now);
    }

    fn ask(&self, hashes: &[u64], max_staleness: Option<Duration>) -> Vec<(String, [u32; 4], State)> {
        let question = Question { hashes: hashes.to_vec(), ..Default::default() };
        let wanted = Wanted { freshness: true, max_staleness, ..Default::default() };
        let scores = self.table.score(&question, &wanted, self.now).unwrap();
        let state = |score: &pb::CacheScore| score.freshness.as_ref().unwrap().state();
        let blocks = |score: &pb::CacheScore| [score.device_blocks, score.host_blocks, score.disk_blocks, score.blocks];
        scores.iter().map(|score| (score.engine.clone(), blocks(score), state(score))).collect()
    }

    fn blocks(&self, hashes: &[u64]) -> Vec<[u32; 4]> {
        self.ask(hashes, None).into_iter().map(|(_, blocks, _)| blocks).collect()
    }
}

#[test]
fn leading_blocks_count_by_how_far_one_reaches() {
    let mut world = World::new();
    world.known("p", "", vec![stored(&[1, 2], "", 16), stored(&[3], "CPU", 16), stored(&[4, 6], "DISK", 16)]);
    world.known("q", "", vec![stored(&[1, 2, 3, 4, 5], "EXTERNAL", 16), stored(&[1], "GPU", 16)]);
    world.known("r", "", vec![stored(&[2, 3], "", 16)]);
    let told = world.ask(&[1, 2, 3, 4, 5], None);
    let expected =
        [("q", [1, 1, 1, 5]), ("p", [2, 3, 4, 4])].map(|(engine, blocks)| (engine.to_owned(), blocks, State::Current));
    assert_eq!(told, expected);
    assert!(world.ask(&[], None).is_empty());
    assert!(world.ask(&[9, 1], None).is_empty());
}

#[test]
fn a_cache_that_nobody_reaches_is_hidden_after_half_a_minute() {
    let mut world = World::new();
    let one = world.known("e", "", vec![stored(&[1], "", 16)]);
    world.hear(&one, Item::Failed { cause: Cause::Ended, lasting: false });
    world.now += HIDE_AFTER - Duration::from_secs(1);
    world.hear(&one, Item::Failed { cause: Cause::Ended, lasting: false });
    assert_eq!(world.ask(&[1], None).len(), 1, "it is hidden at once");
    assert_eq!(world.ask(&[1], Some(Duration::from_secs(5))).len(), 0, "it is told as fresh");
    world.now += Duration::from_secs(2);
    assert_eq!(world.ask(&[1], None).len(), 0, "it attracts requests for ever");
    world.came(&one, begin("a", 3));
    assert_eq!(world.ask(&[1], None).len(), 1, "it is back, in the same log");
}

#[test]
fn another_log_hides_what_was_known_with_its_first_message() {
    let mut world = World::new();
    let one = world.known("e", "", vec![stored(&[1], "", 16)]);
    world.came(&one, begin("b", 0));
    assert!(world.blocks(&[1]).is_empty());
}

#[test]
fn an_old_state_is_told_while_a_snapshot_of_the_same_log_comes() {
    let mut world = World::new();
    let one = world.known("e", "", vec![stored(&[1], "", 16)]);
    world.hear(&one, Item::Reset { log_id: "a".into(), whole: true });
    world.hear(&one, events("a", 9, vec![stored(&[2], "", 16)], false));
    assert_eq!(world.ask(&[1, 2], None), [("e".to_owned(), [1; 4], State::Rebuilding)]);
    world.hear(&one, events("a", 9, Vec::new(), true));
    assert_eq!(world.ask(&[2], None), [("e".to_owned(), [1; 4], State::Current)]);
    assert!(world.blocks(&[1]).is_empty(), "what the snapshot does not hold");
}

#[test]
fn what_comes_late_of_a_cache_that_is_not_followed_any_more_is_passed_over() {
    let mut world = World::new();
    let one = world.known("e", "m", vec![stored(&[1], "", 16)]);
    world.table.remove(&one.1);
    let other = world.known("f", "", vec![stored(&[2], "", 16)]);
    assert_eq!(other.0, one.0, "its number is used again");
    world.hear(&one, events("a", 4, vec![stored(&[7], "", 16)], true));
    assert!(world.blocks(&[7]).is_empty() && world.blocks(&[1]).is_empty());
    assert_eq!(world.blocks(&[2]), [[1; 4]]);
}

#[test]
fn a_question_names_a_model_where_the_caches_are_of_several() {
    let mut world = World::new();
    world.known("p", "m", vec![stored(&[1], "", 16)]);
    let question = |model: &str| Question { hashes: vec![1], model: model.into(), ..Default::default() };
    let engines = |world: &World, model: &str, only: &[&str]| {
        let wanted = Wanted { engines: only.iter().map(ToString::to_string).collect(), ..Default::default() };
        let scores = world.table.score(&question(model), &wanted, world.now);
        scores.map(|scores| scores.into_iter().map(|score| score.engine).collect::<Vec<_>>())
    };
    assert_eq!(engines(&world, "", &[]).unwrap(), ["p"]);
    world.known("q", "n", vec![stored(&[1], "", 16)]);
    assert_eq!(engines(&world, "", &[]).unwrap_err().models, ["m", "n"]);
    assert_eq!(engines(&world, "n", &[]).unwrap(), ["q"]);
    assert_eq!(engines(&world, "", &["p"]).unwrap(), ["p"]);
    assert!(engines(&world, "nobody's", &[]).unwrap().is_empty());
}

#[test]
fn labels_leave_out_caches_whose_rank_lacks_one() {
    let (mut world, zone) = (World::new(), |name: &str| HashMap::from([("zone".to_owned(), name.to_owned())]));
    for (engine, model, labels) in [("A", "a", zone("x")), ("B", "b", zone("y")), ("C", "c", HashMap::new())] {
        let place = CachePlace { model: model.into(), labels, ..CachePlace::default() };
        let key = CacheKey { engine: engine.into(), dp: 0 };
        let known = (world.table.add(key.clone(), place), key);
        world.came(&known, begin("a", 3));
        world.hear(&known, Item::Reset { log_id: "a".into(), whole: true });
        world.hear(&known, events("a", 3, vec![stored(&[1], "GPU", 16)], true));
    }
    // Those that are asked are of one model then.
    for (name, holders) in [("x", vec!["A"]), ("y", vec!["B"]), ("z", vec![])] {
        let question = Question { hashes: vec![1], labels: zone(name), ..Default::default() };
        let scores = world.table.score(&question, &Wanted::default(), world.now).unwrap();
        assert_eq!(scores.iter().map(|score| score.engine.as_str()).collect::<Vec<_>>(), holders);
        let held = world.table.holdings(&question, None, world.now).unwrap();
        assert_eq!(held.iter().map(|holding| holding.key.engine.as_str()).collect::<Vec<_>>(), holders);
    }
}

fn row(tp: u32, epoch: u64) -> pb::RankRow {
    let rank = pb::RankRef { rank: Some(pb::RankId { engine: "e".into(), tp, ..Default::default() }), epoch };
    pb::RankRow { rank: Some(rank), serves_events: true, ..Default::default() }
}

fn changed(registered_ranks: u32, rows: Vec<pb::RankRow>) -> pb::WatchEnginesResponse {
    let engine = pb::Engine { name: "e".into(), registered_ranks, rows, ..Default::default() };
    let change = pb::EngineChange { engine: Some(engine), gone: Vec::new() };
    pb::WatchEnginesResponse { changes: vec![change], ..Default::default() }
}

#[test]
fn a_full_state_takes_the_place_of_what_was_known_once_it_is_complete() {
    let mut mirror = EngineMirror::new();
    let full =
        pb::WatchEnginesResponse { state_begins: true, state_complete: true, ..changed(2, vec![row(0, 1), row(1, 1)]) };
    assert!(mirror.apply(full).contains("e"));
    assert_eq!(mirror.engines["e"].publishers().count(), 1);
    let begins = pb::WatchEnginesResponse { state_begins: true, warming_up: true, ..Default::default() };
    assert!(mirror.apply(begins).is_empty() && mirror.engines.contains_key("e") && mirror.warming_up);
    assert!(mirror.apply(pb::WatchEnginesResponse { state_complete: true, ..Default::default() }).contains("e"));
    assert!(mirror.engines.is_empty());
}

#[test]
fn a_row_that_was_replaced_does_not_go_with_its_older_incarnation() {
    let mut mirror = EngineMirror::new();
    mirror.apply(changed(1, vec![row(0, 2)]));
    let mut late = changed(1, Vec::new());
    late.changes[0].gone = row(0, 1).rank.into_iter().collect();
    mirror.apply(late);
    assert_eq!(mirror.engines["e"].publishers().count(), 1, "epoch 2 went with epoch 1");
    mirror.apply(changed(0, Vec::new()));
    assert!(mirror.engines.is_empty());
}

#[test]
fn a_prompt_has_its_own_tokens_whatever_the_pages_of_a_cache() {
    let load = pb::EngineLoad { prefill_tokens_per_second: 1000.0, ..Default::default() };
    let key = CacheKey { engine: "e".into(), dp: 0 };
    let left = |tokens: u64, page_tokens: u32, have: usize| {
        let ends = [have; crate::groups::REACHES];
        let held = Holding { key: &key, ends, lendable: 0, page_tokens, blocks: 100, load: Some(&load) };
        let asked = PlanQuestion { tokens, ..Default::default() };
        placements(&asked, &[held], &Given::default())[0].compute_tokens
    };
    assert_eq!(left(1600, 64, 0), 1600, "100 hashes are of pages of 16");
    assert_eq!((left(1600, 16, 90), left(0, 16, 90)), (160, 160));
    assert_eq!(left(77, 16, 90), 0, "it has more than all of the prompt");
}

#[test]
fn engines_of_two_kinds_are_in_one_plan() {
    let load = |page_bytes, page_forms: &[u64]| pb::EngineLoad {
        prefill_tokens_per_second: 1000.0,
        waiting_tokens: if page_forms[0] == 1 { 10_000 } else { 0 },
        page_tokens: 16,
        page_bytes,
        page_forms: page_forms.to_vec(),
        ..Default::default()
    };
    let key = |engine: &str| CacheKey { engine: engine.into(), dp: 0 };
    let (busy, idle) = (key("busy"), key("idle"));
    let planned = |busy_load: &pb::EngineLoad, idle_load: &pb::EngineLoad| {
        let of = |blocks: [usize; 2]| {
            let held = [(&busy, busy_load, blocks[0]), (&idle, idle_load, blocks[1])];
            let holding = |(key, load, blocks)| Holding {
                key,
                ends: [blocks; crate::groups::REACHES],
                lendable: blocks,
                page_tokens: 16,
                blocks: 100,
                load: Some(load),
            };
            held.map(holding)
        };
        let mut held = of([90, 0]);
        keep_most(&mut held, of([0, 40]).into());
        placements(&PlanQuestion::default(), &held, &Given::default()).remove(0)
    };
    let best = planned(&load(1_000_000, &[1, 2]), &load(500_000, &[3, 2]));
    let pull = best.pull.unwrap();
    assert_eq!((best.engine.as_str(), best.blocks, pull.engine.as_str()), ("idle", 40, "busy"));
    assert_eq!((pull.host_blocks, pull.blocks, pull.bytes), (90, 50, 25_000_000));
    assert!(planned(&load(1_000_000, &[1]), &load(1_000_000, &[3])).pull.is_none(), "as large, and of no use");
}

#[test]
fn longer_sources_that_are_of_no_use_hide_none_that_is() {
    let (other, busy, idle) = (load_of(1, 10_000), load_of(2, 10_000), load_of(2, 0));
    let of_other_kind = (0..12).map(|number| (format!("other{number}"), 0, 95, &other));
    let best = best_of(of_other_kind.chain([("busy".into(), 0, 90, &busy), ("idle".into(), 0, 0, &idle)]));
    let pull = best.pull.unwrap();
    assert_eq!((best.engine.as_str(), pull.engine.as_str(), pull.blocks), ("idle", "busy", 90));
}

#[test]
fn the_ranks_of_one_engine_hide_no_other_source_from_it() {
    let (busy, idle) = (load_of(1, 10_000), load_of(1, 0));
    let ranks = (1..13).map(|dp| ("wide".into(), dp, 95, &busy));
    let best = best_of(ranks.chain([("narrow".into(), 0, 90, &busy), ("wide".into(), 0, 0, &idle)]));
    assert_eq!((best.engine.as_str(), best.dp, best.pull.unwrap().engine.as_str()), ("wide", 0, "narrow"));
}

fn load_of(form: u64, waiting_tokens: u64) -> pb::EngineLoad {
    pb::EngineLoad {
        prefill_tokens_per_second: 1000.0,
        waiting_tokens,
        page_tokens: 16,
        page_bytes: 1_000_000,
        page_forms: vec![form],
        ..Default::default()
    }
}

/// The best place for a prompt of 100 blocks of which these hold so many each.
fn best_of<'a>(all: impl Iterator<Item = (String, u32, usize, &'a pb::EngineLoad)>) -> pb::Placement {
    let all: Vec<(CacheKey, usize, &pb::EngineLoad)> =
        all.map(|(engine, dp, blocks, load)| (CacheKey { engine, dp }, blocks, load)).collect();
    let held = all.iter().map(|(key, blocks, load)| Holding {
        key,
        ends: [*blocks; crate::groups::REACHES],
        lendable: *blocks,
        page_tokens: 16,
        blocks: 100,
        load: Some(load),
    });
    let held: Vec<Holding> = held.collect();
    placements(&PlanQuestion::default(), &held, &Given::default()).remove(0)
}

#[tokio::test]
async fn a_plan_that_is_refused_or_left_leaves_nothing_reserved() {
    let mut world = World::new();
    for (engine, model) in [("a", "m"), ("b", "n")] {
        let cache = world.known(engine, model, vec![stored(&[1], "", 16)]);
        let load = Some(pb::EngineLoad { prefill_tokens_per_second: 1000.0, ..Default::default() });
        world.came(
            &cache,
            WatchResponse { kind: Some(Kind::Heartbeat(pb::WatchHeartbeat { next_sequence: 3, state: None, load })) },
        );
    }
    let index = PrefixIndex::new(IndexOptions {
        registries: Vec::new(),
        sources: vec!["127.0.0.1:1".into()],
        dial: Arc::new(|address| Dialer::new(address, Options::default())),
        saved: None,
    });
    let index = index.unwrap();
    *index.shared.table.write() = world.table;
    let asked = |model: &str| PlanQuestion {
        question: Question { hashes: vec![1], model: model.into(), ..Default::default() },
        tokens: 1016,
        ..Default::default()
    };
    let queue = || index.plan(&[asked("m")], None, false).unwrap()[0][0].queue_time.unwrap().seconds;
    assert!(index.plan(&[asked("m"), asked("")], None, true).is_err());
    assert_eq!(queue(), 0, "what nobody does as counted for others");
    let mut left = index.begin_plan(None, true);
    left.place(&asked("m")).unwrap();
    assert_eq!(queue(), 1, "others see what is reserved at once");
    drop(left);
    assert_eq!(queue(), 0);
    index.plan(&[asked("m"), asked("n")], None, true).unwrap();
    assert_eq!(queue(), 1);
}

/// An index that saves to `path`, where "a" and "b" lie.
fn saving_to(path: &Path) -> Arc<Shared> {
    let mut world = World::new();
    world.known("a", "", vec![stored(&[1, 2], "", 16)]);
    world.known("b", "", vec![stored(&[1], "", 16)]);
    saved::write(path, world.table.cut(world.now)).unwrap();
    Shared::new(IndexOptions {
        registries: Vec::new(),
        sources: vec!["127.0.0.1:1".into()],
        dial: Arc::new(|address| Dialer::new(address, Options::default())),
        saved: Some(path.to_owned()),
    })
}

/// A registry names an engine, which does not answer.
fn engine_to_follow() -> pb::WatchEnginesResponse {
    let endpoints = Some(pb::Endpoints { grpc: "127.0.0.1:1".into(), ..Default::default() });
    changed(1, vec![pb::RankRow { endpoints, ..row(0, 1) }])
}

async fn until_looked(shared: &Arc<Shared>) -> AbortHandle {
    let looking = tokio::spawn(look_for_caches(shared.clone())).abort_handle();
    while !shared.has_looked() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    looking
}

#[tokio::test]
async fn an_index_that_ends_before_it_knows_all_again_keeps_what_was_saved() {
    let path = std::env::temp_dir().join(format!("kvgrpc-saved-{}", std::process::id()));
    let shared = saving_to(&path);
    let before = std::fs::read(&path).unwrap();
    shared.hear_registry("", engine_to_follow());
    shared.save(Duration::from_secs(60)).await;
    assert_eq!(std::fs::read(&path).unwrap(), before, "it had not read it yet");
    let looking = until_looked(&shared).await;
    // "a" is back, "b" is not.
    let mut again = World::new();
    again.known("a", "", vec![stored(&[1, 2, 3], "", 16)]);
    *shared.table.write() = again.table;
    shared.save(Duration::from_secs(60)).await;
    assert_eq!(std::fs::read(&path).unwrap(), before, "what was known of b is gone");
    looking.abort();
    shared.stop();
    std::fs::remove_file(&path).unwrap();
}

#[tokio::test]
async fn an_index_that_follows_nothing_keeps_what_was_saved() {
    let path = std::env::temp_dir().join(format!("kvgrpc-saved-nothing-{}", std::process::id()));
    let shared = saving_to(&path);
    let before = std::fs::read(&path).unwrap();
    let looking = until_looked(&shared).await;
    shared.forget_saved();
    shared.save(Duration::from_secs(60)).await;
    assert_eq!(std::fs::read(&path).unwrap(), before, "its registry is away, and all that was known is gone");
    shared.hear_registry("", engine_to_follow());
    shared.save(Duration::from_secs(60)).await;
    assert_ne!(std::fs::read(&path).unwrap(), before, "it follows an engine, and saves nothing");
    looking.abort();
    shared.stop();
    std::fs::remove_file(&path).unwrap();
}
