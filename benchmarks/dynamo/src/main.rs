//! Dynamo's index (crate `dynamo-kv-router`) of the blocks that a made-up fleet has, beside
//! `clients/rust/index/examples/direct.rs`: `beside-dynamo ENGINES BLOCKS SECONDS (chains|half|apply)`. Prints a line of JSON.

use std::time::{Duration, Instant};

use dynamo_kv_router::indexer::KvIndexerInterface;
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, ThreadPoolIndexer};

#[path = "../../../clients/rust/index/examples/support/layout.rs"]
mod layout;
#[path = "../../../clients/rust/index/examples/support/measured.rs"]
mod measured;

use layout::{key, Layout, CHAIN};

const PAGE_TOKENS: u32 = 16;
/// Of a layout of halves so many blocks behind each other have the same holders.
const HALVES: usize = 64;

type Indexer = ThreadPoolIndexer<ConcurrentRadixTreeCompressed>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [engines, blocks, seconds, what] = arguments.as_slice() else {
        return Err("ENGINES BLOCKS SECONDS (chains|half|apply)".into());
    };
    let layout = Layout { engines: engines.parse()?, blocks: blocks.parse()?, halves: what == "half" };
    let (seconds, indexer) = (seconds.parse()?, Indexer::new(ConcurrentRadixTreeCompressed::new(), 1, PAGE_TOKENS));
    if what == "apply" {
        return apply(&indexer, &layout, seconds).await;
    }
    for engine in 0..layout.engines {
        fill(&indexer, &layout, engine).await;
        indexer.flush_and_wait().await?;
    }
    if layout.halves {
        return Ok(measured::say_weight()?);
    }
    let question = |chain| (0..CHAIN).map(|at| LocalBlockHash(key(chain, at))).collect::<Vec<_>>();
    let questions: Vec<_> = (0..measured::CHAINS).map(question).collect();
    measured::say_asked(
        &layout,
        seconds,
        |chain| indexer.backend().find_matches_impl(&questions[chain as usize], false),
        |told| told.scores.iter().map(|(worker, blocks)| (worker.worker_id, u64::from(*blocks))).collect(),
    )?;
    Ok(())
}

async fn fill(indexer: &Indexer, layout: &Layout, engine: u64) {
    if layout.halves {
        for blocks in layout.blocks_of(engine).chunks(HALVES) {
            indexer.apply_event(stored(engine, blocks)).await;
        }
        return;
    }
    for chain in 0..layout.chains() {
        let blocks: Vec<u64> = (0..layout.held(engine, chain)).map(|at| key(chain, at)).collect();
        indexer.apply_event(stored(engine, &blocks)).await;
    }
}

/// One engine after the other has a batch of two events, as in ours.
async fn apply(indexer: &Indexer, layout: &Layout, seconds: f64) -> Result<(), Box<dyn std::error::Error>> {
    let made: Vec<_> = (0..layout.engines).map(layout::made).collect();
    let (mut batches, began, all) = (0_u64, Instant::now(), Duration::from_secs_f64(seconds));
    while began.elapsed() < all {
        for (engine, made) in made.iter().enumerate() {
            let (gone, came) = &made[(batches / layout.engines) as usize % made.len()];
            indexer.apply_event(removed(engine as u64, gone)).await;
            indexer.apply_event(stored(engine as u64, came)).await;
            batches += 1;
        }
        // Its queue has no bound.
        indexer.flush_and_wait().await?;
    }
    Ok(measured::say_applied(batches, began.elapsed())?)
}

fn stored(engine: u64, blocks: &[u64]) -> RouterEvent {
    let block = |hash: &u64| KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(*hash),
        tokens_hash: LocalBlockHash(*hash),
        mm_extra_info: None,
    };
    let blocks = blocks.iter().map(block).collect();
    event(engine, KvCacheEventData::Stored(KvCacheStoreData { parent_hash: None, start_position: None, blocks }))
}

fn removed(engine: u64, blocks: &[u64]) -> RouterEvent {
    let block_hashes = blocks.iter().map(|hash| ExternalSequenceBlockHash(*hash)).collect();
    event(engine, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
}

fn event(engine: u64, data: KvCacheEventData) -> RouterEvent {
    RouterEvent::new(engine, KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}
