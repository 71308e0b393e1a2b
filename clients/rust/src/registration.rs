//! Rows that stay registered, for as long as their owner lives and whatever the registry does.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use prost::Message;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{timeout, Instant};
use tokio_stream::wrappers::ReceiverStream;

use crate::connection::Dialer;
use crate::pb::{self, ErrorReason, RankId, RankRow};
use crate::refusal::Refusal;
use crate::registry::Client;
use crate::repeat::silent;

const REGISTER_WITHIN: Duration = Duration::from_secs(5);
const DEREGISTER_WITHIN: Duration = Duration::from_secs(1);
const MOST_ROWS: usize = 1024;
const MOST_BYTES: usize = 1 << 20;
/// Whatever a registry says: it is asked each third of it.
const SHORTEST_TTL: Duration = Duration::from_millis(300);
const USUAL_TTL: Duration = Duration::from_secs(10);
const LONGEST_TTL: Duration = Duration::from_secs(600);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What a Registration is at.
#[derive(Debug, Clone)]
pub enum RegistrationState {
    /// Its leases are renewed.
    Registered,
    /// The registry is away, or refused; it comes back by itself.
    Retrying(Refusal),
    /// A newer incarnation has taken over every row. Its ranks were replaced and must stop.
    Superseded,
}

/// A newer incarnation of a rank took its row over: that rank was replaced and must stop.
#[derive(Debug, Clone, PartialEq)]
pub struct Supersession {
    /// Which rank.
    pub rank: RankId,
    /// The newer one's.
    pub epoch: u64,
}

#[derive(Clone)]
struct Standing {
    state: RegistrationState,
    /// One for each row at most.
    superseded: Vec<Supersession>,
}

/// Keeps rows registered: renews the leases at a third of their time, and registers again when the registry does not know a
/// lease, was restarted, or did not answer. Dropped without `close`, its leases run out.
pub struct Registration {
    standing: watch::Receiver<Standing>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Keeper>,
}

impl Registration {
    pub(crate) async fn begin(replicas: Vec<Dialer>, rows: Vec<RankRow>, within: Duration) -> Result<Self, Refusal> {
        let registered = Standing { state: RegistrationState::Registered, superseded: Vec::new() };
        let (say, standing) = watch::channel(registered);
        let mut keeper = Keeper::new(replicas, rows, say);
        let (deadline, mut attempt) = (Instant::now() + within, 0);
        while let Err(refusal) = keeper.register(keeper.rows.clone()).await {
            let pause = keeper.pause(attempt, refusal.retry_after);
            if !refusal.may_repeat() || Instant::now() + pause >= deadline {
                return Err(refusal);
            }
            tokio::time::sleep(pause).await;
            keeper.hang_up();
            attempt += 1;
        }
        let (stop, mut stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            tokio::select! {
                () = keeper.look_after() => {}
                // A dropped Registration deregisters nothing.
                _ = &mut stopped => {}
            }
            keeper
        });
        Ok(Self { standing, stop, task })
    }

    /// What it is at.
    pub fn state(&self) -> RegistrationState {
        self.standing.borrow().state.clone()
    }

    /// The ranks whose rows were taken over, since it began.
    pub fn superseded(&self) -> Vec<Supersession> {
        self.standing.borrow().superseded.clone()
    }

    /// Waits until either changes; without end, where nothing can change any more. Dropping the future loses nothing.
    pub async fn changed(&mut self) {
        if self.standing.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Stops, and deregisters within a second if the registry answers; otherwise the leases run out.
    pub async fn close(self) -> Result<(), Refusal> {
        let _ = self.stop.send(());
        match self.task.await {
            Ok(keeper) => keeper.deregister().await,
            Err(_) => Ok(()),
        }
    }
}

struct Keeper {
    replicas: VecDeque<Dialer>,
    client: Client,
    rows: Vec<RankRow>,
    leases: HashMap<u64, RankRow>,
    ttl: Duration,
    standing: watch::Sender<Standing>,
}

impl Keeper {
    fn new(replicas: Vec<Dialer>, rows: Vec<RankRow>, standing: watch::Sender<Standing>) -> Self {
        let client = Client::new(replicas[0].channel());
        Self { replicas: replicas.into(), client, rows, leases: HashMap::new(), ttl: USUAL_TTL, standing }
    }

    fn note(&self, state: RegistrationState) {
        self.standing.send_modify(|standing| standing.state = state);
    }

    async fn look_after(&mut self) {
        let (mut attempt, mut is_registered) = (0, true);
        while !self.rows.is_empty() {
            let Err(refusal) = self.hold(&mut is_registered, &mut attempt).await;
            if refusal.reason == ErrorReason::StaleEpoch {
                self.supersede(&refusal);
                continue;
            }
            is_registered = false;
            let pause = self.pause(attempt, refusal.retry_after);
            self.note(RegistrationState::Retrying(refusal));
            tokio::time::sleep(pause).await;
            self.hang_up();
            attempt += 1;
        }
        self.note(RegistrationState::Superseded);
    }

    /// Registers where that is needed, then renews until something fails.
    async fn hold(&mut self, is_registered: &mut bool, attempt: &mut u32) -> Result<std::convert::Infallible, Refusal> {
        if !*is_registered {
            self.register(self.rows.clone()).await?;
            *is_registered = true;
            self.note(RegistrationState::Registered);
        }
        let (say, said) = mpsc::channel(1);
        let mut client = self.client.clone();
        let _ = say.send(self.renewal()).await;
        let call = client.keep_alive(ReceiverStream::new(said));
        let mut answers = timeout(self.patience(), call).await.map_err(|_| silent())??.into_inner();
        loop {
            let answer = timeout(self.patience(), answers.message()).await.map_err(|_| silent())??;
            let answer = answer.ok_or_else(ended)?;
            self.ttl = ttl_of(answer.ttl);
            // Not before: where every renewal is refused, ranks that register anew at once would be a storm.
            *attempt = 0;
            let unknown: Vec<_> =
                answer.unknown_lease_ids.iter().filter_map(|lease| self.leases.remove(lease)).collect();
            self.register(unknown).await?;
            tokio::select! {
                () = tokio::time::sleep(self.ttl / 3) => {}
                early = answers.message() => return Err(early.err().map_or_else(ended, Refusal::from)),
            }
            let _ = say.send(self.renewal()).await;
        }
    }

    fn renewal(&self) -> pb::KeepAliveRequest {
        pb::KeepAliveRequest { lease_ids: self.leases.keys().copied().collect() }
    }

    fn patience(&self) -> Duration {
        (self.ttl / 3).max(Duration::from_secs(1))
    }

    async fn register(&mut self, rows: Vec<RankRow>) -> Result<(), Refusal> {
        let mut left = rows.as_slice();
        while !left.is_empty() {
            let (chunk, rest) = left.split_at(fitting(left));
            let mut client = self.client.clone();
            let call = client.register(pb::RegisterRequest { rows: chunk.to_vec() });
            let response = timeout(REGISTER_WITHIN, call).await.map_err(|_| silent())??.into_inner();
            self.ttl = ttl_of(response.ttl);
            self.leases.retain(|_, row| !chunk.contains(row));
            let leases = response.leases.iter().map(|lease| lease.lease_id);
            self.leases.extend(leases.zip(chunk.iter().cloned()));
            left = rest;
        }
        Ok(())
    }

    fn supersede(&mut self, refusal: &Refusal) {
        let told = |key: &str| refusal.metadata.get(key).cloned().unwrap_or_default();
        let (rank, epoch) = (told("rank"), told("currentEpoch").parse().unwrap_or(0));
        let is_gone = |row: &RankRow| rank_of(row).is_some_and(|id| name_of(id) == rank);
        let (mut lost, kept): (Vec<_>, Vec<_>) = self.rows.drain(..).partition(is_gone);
        self.rows = kept;
        if lost.is_empty() {
            lost = std::mem::take(&mut self.rows);
        }
        self.leases.retain(|_, row| !lost.contains(row));
        let told = lost.iter().map(|row| Supersession { rank: rank_of(row).cloned().unwrap_or_default(), epoch });
        self.standing.send_modify(|standing| standing.superseded.extend(told));
    }

    async fn deregister(mut self) -> Result<(), Refusal> {
        for chunk in self.rows.chunks(MOST_ROWS) {
            let ranks = chunk.iter().filter_map(|row| row.rank.clone()).collect();
            let call = self.client.deregister(pb::DeregisterRequest { ranks });
            timeout(DEREGISTER_WITHIN, call).await.map_err(|_| silent())??;
        }
        Ok(())
    }

    /// Wide, because all ranks of a cluster lose their registry at the same moment.
    fn pause(&self, attempt: u32, asked: Option<Duration>) -> Duration {
        let (first, longest) = ((self.ttl / 10).min(Duration::from_secs(1)), (self.ttl / 3).min(LONGEST_PAUSE));
        let pause = (first * (1 << attempt.min(16))).min(longest);
        asked.unwrap_or_default().min(LONGEST_TTL) + pause / 10 + (pause * 9 / 10).mul_f64(fastrand::f64())
    }

    /// Goes on at the next replica, on a new connection.
    fn hang_up(&mut self) {
        self.replicas.rotate_left(1);
        self.client = Client::new(self.replicas[0].channel());
    }
}

/// Counts the first rows that one request may have; at least one.
fn fitting(rows: &[RankRow]) -> usize {
    let mut bytes = 0;
    let is_full = |(at, row): (usize, &RankRow)| {
        bytes += row.encoded_len();
        at > 0 && (at == MOST_ROWS || bytes > MOST_BYTES)
    };
    rows.iter().enumerate().position(is_full).unwrap_or(rows.len())
}

fn rank_of(row: &RankRow) -> Option<&RankId> {
    row.rank.as_ref().and_then(|rank| rank.rank.as_ref())
}

/// How a registry's refusals call a rank.
fn name_of(rank: &RankId) -> String {
    format!("{}/dp{}/pp{}/cp{}/tp{}", rank.engine, rank.dp, rank.pp, rank.cp, rank.tp)
}

fn ttl_of(told: Option<prost_types::Duration>) -> Duration {
    let told = told.and_then(|told| Duration::try_from(told).ok()).filter(|told| !told.is_zero());
    told.map_or(USUAL_TTL, |told| told.clamp(SHORTEST_TTL, LONGEST_TTL))
}

fn ended() -> Refusal {
    tonic::Status::unavailable("the registry ended the stream").into()
}
