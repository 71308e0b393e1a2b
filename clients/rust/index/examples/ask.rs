//! Asks an index of a made-up fleet, and checks what it says:
//! `ask ADDRESS ENGINES BLOCKS BATCH MOST SECONDS TASKS RATE`. RATE is questions a second, at even distances; 0: as fast as can.
//! Prints a line of JSON: questions a second, and how long calls took (from when they were due), in microseconds.

use std::sync::Arc;
use std::time::Duration;

use kvgrpc::pb::index_service_client::IndexServiceClient;
use kvgrpc::pb::{score_prompt::Prefix, BlockHashes, ScorePrompt, ScoreRequest};
use kvgrpc::{AuthorizedChannel, Dialer, Options};
use tokio::time::Instant;

#[path = "support/alarm.rs"]
mod alarm;
#[path = "support/layout.rs"]
mod layout;

use alarm::Alarm;
use layout::{engine_name, key, Layout, CHAIN};

struct Plan {
    layout: Layout,
    batch: u64,
    most: u32,
    tasks: u64,
    rate: f64,
    begin: Instant,
    end: Instant,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, engines, blocks, batch, most, seconds, tasks, rate] = arguments.as_slice() else {
        return Err("ADDRESS ENGINES BLOCKS BATCH MOST SECONDS TASKS RATE".into());
    };
    let begin = Instant::now();
    let plan = Arc::new(Plan {
        layout: Layout { engines: engines.parse()?, blocks: blocks.parse()?, halves: false },
        batch: batch.parse()?,
        most: most.parse()?,
        tasks: tasks.parse()?,
        rate: rate.parse()?,
        begin,
        end: begin + Duration::from_secs_f64(seconds.parse()?),
    });
    let channel = Dialer::new(address, Options::default())?.channel();
    let asking: Vec<_> = (0..plan.tasks).map(|task| tokio::spawn(ask(plan.clone(), task, channel.clone()))).collect();
    let mut took = Vec::new();
    for task in asking {
        took.append(&mut task.await??);
    }
    took.sort_unstable();
    let percentile = |part: usize| took.get(took.len() * part / 1000).map_or(0.0, |took| took.as_secs_f64() * 1e6);
    let questions = took.len() as f64 * plan.batch as f64 / begin.elapsed().as_secs_f64();
    let told = serde_json::json!({ "questions": questions, "p50": percentile(500), "p99": percentile(990) });
    println!("{told}");
    Ok(())
}

async fn ask(plan: Arc<Plan>, task: u64, channel: AuthorizedChannel) -> Result<Vec<Duration>, String> {
    let mut client = IndexServiceClient::new(channel).max_decoding_message_size(64 << 20);
    let alarm = Alarm::new().map_err(|error| error.to_string())?;
    let (mut random, mut took) = (fastrand::Rng::with_seed(task), Vec::new());
    for call in 0.. {
        let due = match plan.rate {
            rate if rate > 0.0 => {
                plan.begin + Duration::from_secs_f64((call * plan.tasks + task) as f64 * plan.batch as f64 / rate)
            }
            _ => Instant::now(),
        };
        if due >= plan.end {
            break;
        }
        let chains: Vec<u64> = (0..plan.batch).map(|_| random.u64(..plan.layout.chains())).collect();
        let prompts = chains.iter().map(|chain| prompt(*chain)).collect();
        let request = ScoreRequest { prompts, max_scores: plan.most, ..Default::default() };
        alarm.until(due).await.map_err(|error| error.to_string())?;
        let told = client.score(request).await.map_err(|status| status.to_string())?.into_inner();
        took.push(due.elapsed());
        let right = told.prompts.iter().zip(&chains).all(|(told, chain)| {
            let all = plan.layout.engines as usize;
            let count = if plan.most == 0 { all } else { all.min(plan.most as usize) };
            told.scores.len() == count && told.scores.iter().all(|score| is_right(&plan.layout, *chain, score))
        });
        if !right || told.prompts.len() != chains.len() {
            return Err("an engine was scored wrong".to_owned());
        }
    }
    Ok(took)
}

fn prompt(chain: u64) -> ScorePrompt {
    let values = (0..CHAIN).map(|at| key(chain, at)).collect();
    ScorePrompt { prefix: Some(Prefix::BlockHashes(BlockHashes { values })), ..Default::default() }
}

fn is_right(layout: &Layout, chain: u64, score: &kvgrpc::pb::CacheScore) -> bool {
    let engine = score.engine.trim_start_matches("engine").parse().unwrap_or(u64::MAX);
    engine < layout.engines
        && score.engine == engine_name(engine)
        && u64::from(score.blocks) == layout.held(engine, chain)
}
