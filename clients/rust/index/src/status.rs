//! What a kubelet and Prometheus ask over plain HTTP (`/livez`, `/readyz`, `/metrics`), and whether routers are sent here.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use axum::Router;
use kvgrpc::pb::IndexSourceState;
use kvgrpc::PrefixIndex;
use tokio::net::TcpListener;

use crate::latency::Latency;

/// Routers are sent to an index that knows so much of what it follows (in tenths), or began so long ago.
const KNOWN_TENTHS: usize = 9;
const KNOWN_WITHIN: Duration = Duration::from_secs(60);
pub const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// Prompts that were scored, those of which no cache held the first block, and how long calls took.
#[derive(Default)]
pub struct Counts {
    pub prompts: AtomicU64,
    pub misses: AtomicU64,
    pub score: Latency,
    pub plan: Latency,
}

/// What the pages tell.
#[derive(Clone)]
pub struct Status {
    pub index: Arc<PrefixIndex>,
    pub counts: Arc<Counts>,
    pub draining: Arc<AtomicBool>,
    began: Instant,
    was_ready: Arc<AtomicBool>,
}

impl Status {
    pub fn new(index: Arc<PrefixIndex>, counts: Arc<Counts>, draining: Arc<AtomicBool>) -> Self {
        Self { index, counts, draining, began: Instant::now(), was_ready: Arc::default() }
    }

    /// Whether it once knew most of what it follows: one that only begins would take every cache for empty.
    pub fn is_ready(&self) -> bool {
        if !self.was_ready.load(Ordering::Relaxed) {
            let (current, followed) = self.index.standing();
            let is_known = self.index.has_looked() && 10 * current >= KNOWN_TENTHS * followed;
            self.was_ready.store(is_known || self.began.elapsed() > KNOWN_WITHIN, Ordering::Relaxed);
        }
        self.was_ready.load(Ordering::Relaxed) && self.index.is_healthy() && !self.draining.load(Ordering::Relaxed)
    }

    /// Serves the pages until the process ends.
    pub async fn serve(self, listener: TcpListener) -> std::io::Result<()> {
        let pages = Router::new()
            .route("/livez", get(livez))
            .route("/readyz", get(readyz))
            .route("/metrics", get(metrics))
            .with_state(self);
        axum::serve(listener, pages).await
    }
}

fn lines(checks: &[(&str, bool)]) -> (StatusCode, String) {
    let code = if checks.iter().all(|(_, holds)| *holds) { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, checks.iter().map(|(name, holds)| format!("[{}] {name}\n", if *holds { '+' } else { '-' })).collect())
}

async fn livez(State(status): State<Status>) -> (StatusCode, String) {
    lines(&[("index", status.index.is_healthy())])
}

async fn readyz(State(status): State<Status>) -> (StatusCode, String) {
    let (current, followed) = status.index.standing();
    lines(&[(&format!("{current} of {followed} caches are current"), status.is_ready())])
}

/// By the names of the index in Python.
async fn metrics(State(status): State<Status>) -> String {
    let standing = status.index.sources_behind(None, &[], 0);
    let mut text = String::new();
    let mut say = |name: &str, kind: &str, help: &str, values: &[(String, u64)]| {
        let family = name.trim_end_matches("_total");
        let _ = writeln!(text, "# HELP {family} {help}\n# TYPE {family} {kind}");
        for (labels, value) in values {
            let _ = writeln!(text, "{name}{labels} {value}");
        }
    };
    let in_state = |state: IndexSourceState| {
        let short = state.as_str_name().trim_start_matches("INDEX_SOURCE_STATE_");
        (format!("{{state=\"{short}\"}}"), standing.counts.get(&state.into()).copied().unwrap_or(0).into())
    };
    let states = [
        IndexSourceState::Connecting,
        IndexSourceState::Rebuilding,
        IndexSourceState::CatchingUp,
        IndexSourceState::Current,
        IndexSourceState::Doubtful,
    ];
    let one = |value: u64| [(String::new(), value)];
    let count = |counted: &AtomicU64| one(counted.load(Ordering::Relaxed));
    say("kvgrpc_index_sources", "gauge", "Caches that an index follows, by how they are known.", &states.map(in_state));
    let lacking = status.index.not_followed().len() as u64;
    say("kvgrpc_index_not_followed", "gauge", "Engines and addresses that an index cannot follow.", &one(lacking));
    let help = "Batches that are known to be missing, of all caches.";
    say("kvgrpc_index_lag_batches", "gauge", help, &one(standing.lag_batches));
    let blocks = status.index.blocks();
    say("kvgrpc_index_blocks", "gauge", "Different blocks that an index knows.", &one(blocks));
    say("kvgrpc_index_prompts_total", "counter", "Prompts that were scored.", &count(&status.counts.prompts));
    let help = "Prompts of which no cache held the first block.";
    say("kvgrpc_index_prompt_misses_total", "counter", help, &count(&status.counts.misses));
    if let Some(resident) = resident_bytes() {
        say("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", &one(resident));
    }
    let _ = writeln!(text, "# HELP kvgrpc_rpc_seconds How long unary calls took.\n# TYPE kvgrpc_rpc_seconds histogram");
    for (call, latency) in [("Score", &status.counts.score), ("Plan", &status.counts.plan)] {
        latency.write(&mut text, "kvgrpc_rpc_seconds", &format!("method=\"/kvgrpc.v1.IndexService/{call}\""));
    }
    text
}

fn resident_bytes() -> Option<u64> {
    let told = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = told.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kilobytes| 1024 * kilobytes)
}
