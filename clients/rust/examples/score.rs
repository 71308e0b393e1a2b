//! Follows the caches of engines in its own process, as a router does, and says who holds the beginning of a request:
//! `score [--registry HOST:PORT[,HOST:PORT...]] [RANK_HOST:PORT ...]`.
//!
//! Each line of its input is a question in JSON, {"Hashes": [1, 2]}, and each line of its output an answer.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::sync::Arc;

use kvgrpc::{Dialer, IndexOptions, Options, PrefixIndex, Question, Wanted};
use serde::Deserialize;
use serde_json::{json, Value};

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "PascalCase")]
struct Asked {
    hashes: Vec<u64>,
    chains: BTreeMap<u32, Vec<u64>>,
    step_tokens: u32,
    model: String,
    engines: Vec<String>,
    most: usize,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut registries, mut sources) = (Vec::new(), Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument.trim_start_matches('-') == "registry" {
            let replicas = arguments.next().unwrap_or_default();
            registries.extend(replicas.split(',').map(str::to_owned));
        } else {
            sources.push(argument);
        }
    }
    let dial = Arc::new(|address: &str| Dialer::new(address, Options::default()));
    let index = PrefixIndex::new(IndexOptions { registries, sources, dial, saved: None })?;
    tokio::task::spawn_blocking(move || answer(&index)).await??;
    Ok(())
}

fn answer(index: &PrefixIndex) -> std::io::Result<()> {
    let mut out = std::io::stdout();
    for line in std::io::stdin().lock().lines() {
        let told = match serde_json::from_str(&line?) {
            Ok(asked) => ask(index, asked),
            Err(error) => json!({ "Error": error.to_string() }),
        };
        writeln!(out, "{told}")?;
        out.flush()?;
    }
    Ok(())
}

fn ask(index: &PrefixIndex, asked: Asked) -> Value {
    let Asked { hashes, chains, step_tokens, model, engines, most } = asked;
    let wanted = Wanted { engines, most, freshness: true, max_staleness: None };
    let (scores, error) =
        match index.score(&Question { hashes, chains, step_tokens, model, ..Question::default() }, &wanted) {
            Ok(scores) => (scores.iter().map(as_json).collect(), String::new()),
            Err(error) => (Vec::new(), error.to_string()),
        };
    let sources: Vec<_> = index.sources().iter().map(in_a_line).collect();
    json!({ "Scores": scores, "Sources": sources, "NotFollowed": index.not_followed(), "Error": error })
}

fn as_json(score: &kvgrpc::pb::CacheScore) -> Value {
    let freshness = score.freshness.clone().unwrap_or_default();
    json!({
        "engine": score.engine,
        "dp": score.dp,
        "deviceBlocks": score.device_blocks,
        "hostBlocks": score.host_blocks,
        "diskBlocks": score.disk_blocks,
        "blocks": score.blocks,
        "pageTokens": score.page_tokens,
        "freshness": {
            "state": freshness.state().as_str_name(),
            "logId": freshness.log_id,
            "nextSequence": freshness.next_sequence.to_string(),
            "lagBatches": freshness.lag_batches.to_string(),
            "whole": freshness.whole,
        },
    })
}

fn in_a_line(source: &kvgrpc::pb::IndexSource) -> String {
    let known = source.freshness.clone().unwrap_or_default();
    let state = known.state().as_str_name();
    format!("{} dp{} {state} {} {}", source.engine, source.dp, known.log_id, known.next_sequence)
}
