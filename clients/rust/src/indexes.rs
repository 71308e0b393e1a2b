//! Several indexes of one fleet: who routes asks one of them, and waits for none.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::time::timeout_at;
use tonic::{Code, Request, Response, Status};

use crate::connection::{AuthorizedChannel, Dialer};
use crate::pb::{self, index_service_client::IndexServiceClient};
use crate::refusal::Refusal;

/// Of a router: in the path of every request.
const USUAL_WAIT: Duration = Duration::from_millis(20);
/// Those that are not asked are looked at so often, and so long.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

type Client = IndexServiceClient<AuthorizedChannel>;

/// Asks several indexes of one fleet. A question goes to the one that failed longest ago, and where that refuses at once to the
/// next. After its time there is no answer, and the next question goes elsewhere.
pub struct Indexes {
    indexes: Mutex<Vec<OneOf>>,
    within: Duration,
    unanswered: AtomicU64,
}

#[derive(Clone)]
struct OneOf {
    client: Client,
    number: usize,
    /// When it last did not answer.
    failed_at: Option<Instant>,
    looked_at: Option<Instant>,
}

impl Indexes {
    /// Those that these dial, and a wait of 20 ms. Nobody is asked before a question is.
    pub fn new(dialers: &[Dialer]) -> Self {
        let one = |(number, dialer): (usize, &Dialer)| {
            let client = Client::new(dialer.channel());
            OneOf { client, number, failed_at: None, looked_at: None }
        };
        let indexes = Mutex::new(dialers.iter().enumerate().map(one).collect());
        Self { indexes, within: USUAL_WAIT, unanswered: AtomicU64::new(0) }
    }

    /// The same, whose questions wait so long.
    pub fn within(self, within: Duration) -> Self {
        Self { within, ..self }
    }

    /// Who holds the beginnings of requests; None: nobody answered in time. A refusal is what no other index would answer either.
    pub async fn score(&self, request: pb::ScoreRequest) -> Result<Option<pb::ScoreResponse>, Refusal> {
        self.first(|mut client, asked| async move { client.score(asked).await }, request).await
    }

    /// Where to run requests, and from whom to pull which part of their prompts; otherwise as `score`.
    pub async fn plan(&self, request: pb::PlanRequest) -> Result<Option<pb::PlanResponse>, Refusal> {
        self.first(|mut client, asked| async move { client.plan(asked).await }, request).await
    }

    /// Questions that nobody answered in time.
    pub fn unanswered(&self) -> u64 {
        self.unanswered.load(Ordering::Relaxed)
    }

    async fn first<M: Clone, R, F: Future<Output = Result<Response<R>, Status>>>(
        &self,
        ask: impl Fn(Client, Request<M>) -> F,
        message: M,
    ) -> Result<Option<R>, Refusal> {
        let end = tokio::time::Instant::now() + self.within;
        for index in self.in_turn() {
            let left = end.saturating_duration_since(tokio::time::Instant::now());
            if left.is_zero() {
                break;
            }
            let mut request = Request::new(message.clone());
            request.set_timeout(left);
            let refusal = match timeout_at(end, ask(index.client, request)).await {
                Ok(Ok(response)) => return Ok(Some(response.into_inner())),
                Ok(Err(status)) => Refusal::from(status),
                Err(_) => Status::deadline_exceeded("nobody answered in time").into(),
            };
            // tonic itself says CANCELLED where a call's time is over.
            let is_late = matches!(refusal.code, Code::DeadlineExceeded | Code::Cancelled);
            if !refusal.may_repeat() && !is_late {
                return Err(refusal);
            }
            self.indexes.lock()[index.number].failed_at = Some(Instant::now());
        }
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        Ok(None)
    }

    /// The one that failed longest ago first. The others connect meanwhile: nobody has time for that when the first one dies.
    fn in_turn(&self) -> Vec<OneOf> {
        let mut indexes = self.indexes.lock();
        let mut in_turn = indexes.clone();
        in_turn.sort_by_key(|each| each.failed_at);
        for other in in_turn.iter_mut().skip(1) {
            if other.looked_at.is_none_or(|at| at.elapsed() >= LOOK_INTERVAL) {
                indexes[other.number].looked_at = Some(Instant::now());
                tokio::spawn(look(other.client.clone()));
            }
        }
        in_turn
    }
}

/// A small question: the channel connects with it.
async fn look(mut client: Client) {
    let mut request = Request::new(pb::ListSourcesRequest { page_size: 1, ..Default::default() });
    request.set_timeout(LOOK_INTERVAL);
    let _ = tokio::time::timeout(LOOK_INTERVAL, client.list_sources(request)).await;
}
