//! How the sides of `index.native.direct` are measured: one thread that asks as fast as it can, and what its process weighs.

use std::time::{Duration, Instant};

use super::layout::Layout;

/// Of these conversations the answers are known; they are asked about in turn.
pub const CHAINS: u64 = 1024;

/// Says a line of JSON: questions a second, and how long one took, in microseconds. `ask` asks of a conversation; `told` says which
/// engines hold how many of its leading blocks by that answer.
pub fn say_asked<A>(
    layout: &Layout,
    seconds: f64,
    mut ask: impl FnMut(u64) -> A,
    told: impl Fn(&A) -> Vec<(u64, u64)>,
) -> Result<(), String> {
    let (mut took, began, all) = (Vec::new(), Instant::now(), Duration::from_secs_f64(seconds));
    for at in (0..CHAINS.min(layout.chains())).cycle() {
        let begin = Instant::now();
        let answer = ask(at);
        took.push(begin.elapsed());
        let told = told(&answer);
        let wrong = told.iter().any(|(engine, blocks)| *blocks != layout.held(*engine, at));
        if wrong || told.len() as u64 != layout.engines {
            return Err(format!("conversation {at} was scored wrong: {told:?}"));
        }
        if began.elapsed() > all {
            break;
        }
    }
    let spent: Duration = took.iter().sum();
    let questions = took.len() as f64 / spent.as_secs_f64();
    took.sort_unstable();
    let percentile = |part: usize| took[took.len() * part / 1000].as_secs_f64() * 1e6;
    println!(
        "{{\"questions\": {questions}, \"p50\": {}, \"p99\": {}, \"rss\": {}}}",
        percentile(500),
        percentile(990),
        rss()?
    );
    Ok(())
}

/// Says a line of JSON: how many batches a second were taken.
pub fn say_applied(batches: u64, took: Duration) -> Result<(), String> {
    println!("{{\"batches\": {}, \"rss\": {}}}", batches as f64 / took.as_secs_f64(), rss()?);
    Ok(())
}

/// Says a line of JSON: what the process weighs, in bytes.
pub fn say_weight() -> Result<(), String> {
    println!("{{\"rss\": {}}}", rss()?);
    Ok(())
}

fn rss() -> Result<u64, String> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.map(|kib| 1024 * kib).ok_or_else(|| "/proc/self/status has no VmRSS".to_owned())
}
