//! `PrefixIndex` in its own process, beside `benchmarks/dynamo`:
//! `direct ADDRESS ENGINES BLOCKS SECONDS (chains|half|apply)`. It follows the made-up fleet at the address (chains, half), or takes
//! batches that were made beforehand (apply). Prints a line of JSON.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvgrpc::{Cache, Dialer, Event, IndexOptions, Options, PrefixIndex, Question, Wanted};

#[path = "support/layout.rs"]
mod layout;
#[path = "support/measured.rs"]
mod measured;

use layout::{key, Layout, CHAIN};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, engines, blocks, seconds, what] = arguments.as_slice() else {
        return Err("ADDRESS ENGINES BLOCKS SECONDS (chains|half|apply)".into());
    };
    let layout = Layout { engines: engines.parse()?, blocks: blocks.parse()?, halves: what == "half" };
    if what == "apply" {
        return Ok(apply(&layout, seconds.parse()?)?);
    }
    let index = PrefixIndex::new(IndexOptions {
        registries: Vec::new(),
        sources: vec![address.clone()],
        dial: Arc::new(|address| Dialer::new(address, Options::default())),
        saved: None,
    })?;
    index.until_current(layout.engines as usize).await;
    if layout.halves {
        return Ok(measured::say_weight()?);
    }
    let seconds = seconds.parse()?;
    tokio::task::block_in_place(|| ask(&index, &layout, seconds))?;
    Ok(())
}

fn ask(index: &PrefixIndex, layout: &Layout, seconds: f64) -> Result<(), String> {
    let question = |chain| Question { hashes: (0..CHAIN).map(|at| key(chain, at)).collect(), ..Question::default() };
    let (questions, wanted): (Vec<_>, _) = ((0..measured::CHAINS).map(question).collect(), Wanted::default());
    let number = |engine: &str| engine.trim_start_matches("engine").parse().unwrap_or(u64::MAX);
    measured::say_asked(
        layout,
        seconds,
        |chain| index.score(&questions[chain as usize], &wanted).unwrap_or_default(),
        |told| told.iter().map(|score| (number(&score.engine), u64::from(score.blocks))).collect(),
    )
}

/// One cache after the other takes a batch.
fn apply(layout: &Layout, seconds: f64) -> Result<(), String> {
    let events = |engine| layout::made(engine).into_iter().map(stored_and_removed).collect::<Vec<_>>();
    let made: Vec<Vec<[Event; 2]>> = (0..layout.engines).map(events).collect();
    let mut caches: Vec<Cache> = made.iter().map(|_| Cache::new()).collect();
    let (mut batches, began, all) = (0_u64, Instant::now(), Duration::from_secs_f64(seconds));
    while began.elapsed() < all {
        for (cache, made) in caches.iter_mut().zip(&made) {
            cache.apply(&made[(batches / layout.engines) as usize % made.len()]);
            batches += 1;
        }
    }
    measured::say_applied(batches, began.elapsed())
}

fn stored_and_removed((gone, stored): (Vec<u64>, Vec<u64>)) -> [Event; 2] {
    let hashes = |keys: Vec<u64>| keys.into_iter().map(kvgrpc::BlockHash::Value).collect();
    let removed = kvgrpc::BlockRemoved { hashes: hashes(gone), ..Default::default() };
    let stored = kvgrpc::BlockStored { hashes: hashes(stored), block_size: 16, ..Default::default() };
    [Event::BlockRemoved(removed), Event::BlockStored(stored)]
}
