//! A Watch that goes on over breaks and restarts: the rules of docs/followers.md.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{timeout, Instant};
use tonic::{Code, Status};

use crate::batch::{decode_batch, Batch, Event, NotABatch};
use crate::contents::Verdict;
use crate::pb::{self, watch_response::Kind, ErrorReason, WatchMode, WatchResponse};
use crate::refusal::Refusal;
use crate::silence::heard_within;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// After so long without a failure the next one is the first again.
const CALM: Duration = Duration::from_secs(60);
/// A publisher that asks for more time is asked again all the same.
const LONGEST_ASKED: Duration = Duration::from_secs(60);
/// Heartbeats come each second: a publisher that is idle for so long is taken for gone.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// For a place among those who take a snapshot nobody waits longer.
pub(crate) const LONGEST_TURN: Duration = Duration::from_secs(2);

/// What to follow.
#[derive(Debug, Clone, Default)]
pub struct Stream {
    /// The engine; empty where the server publishes exactly one stream.
    pub engine: String,
    /// Which independent KV cache of it.
    pub dp: u32,
    /// Batches come as messages in place of the engine's own bytes.
    pub typed: bool,
}

/// What a Watch says.
#[derive(Debug, Clone)]
pub enum Item {
    /// What was known is no state of the cache any more: another log is current, a batch cannot be read, or a digest differs.
    /// Nothing is known until what follows the next Reset is complete.
    Void(Cause),
    /// A state follows: from an empty cache on, what it holds once Events are complete. Until then what was known of the same
    /// log is old, and was true: show it until then.
    Reset {
        /// The log.
        log_id: String,
        /// False where the server keeps no snapshot and its log began before what can be read.
        whole: bool,
    },
    /// Events of one batch, or of a part of a snapshot. All batches before `next_sequence` are in, once complete.
    Events {
        /// The log.
        log_id: String,
        /// What comes next.
        next_sequence: u64,
        /// What happened.
        events: Vec<Event>,
        /// False within a snapshot: what it said so far is no state of the cache yet.
        complete: bool,
        /// What a snapshot must come to, with its last part.
        state: Option<pb::StateDigest>,
    },
    /// All batches before `next_sequence` were told.
    Current {
        /// The log.
        log_id: String,
        /// What comes next.
        next_sequence: u64,
        /// The publisher's digest of the same or an earlier sequence; None where it keeps none.
        state: Option<pb::StateDigest>,
        /// How many batches the publisher has beyond: 0, but under load.
        lag: u64,
    },
    /// A call broke, was refused or said what cannot be, and another one follows after a pause: what is known stays, unless Void
    /// came before. Whoever would rather end leaves.
    Failed {
        /// Why.
        cause: Cause,
        /// What time alone can hardly mend (a wrong name, no permission): a person should hear of it.
        lasting: bool,
    },
}

/// Why a call ended, or what was known is void.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Cause {
    /// The server refused, or nobody answered.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A frozen publisher, or a host that vanished.
    #[error("nothing came for 5 s")]
    Silent,
    /// It ended the call, and said no reason.
    #[error("the publisher ended the call")]
    Ended,
    /// Something was lost, here or there.
    #[error("a digest of the publisher's is not that of its events")]
    Differs,
    /// The publisher was restarted.
    #[error("log {0} is over, {1} is current")]
    NewLog(String, String),
    /// Batches are missing.
    #[error("a Watch went from {0} to {1}")]
    Gap(u64, u64),
    /// What it said is lost.
    #[error(transparent)]
    NotABatch(#[from] NotABatch),
}

/// Who makes calls.
pub(crate) trait Calls: Send {
    type Call: Messages;
    fn watch(&mut self, request: pb::WatchRequest) -> impl Future<Output = Result<Self::Call, Status>> + Send;
    /// The connection is of no use: the next call takes another one.
    fn leave(&mut self) {}
}

/// The messages of one call. Whoever stops to wait for the next one loses none.
pub(crate) trait Messages: Send {
    fn next(&mut self) -> impl Future<Output = Result<Option<WatchResponse>, Status>> + Send;
}

/// Hears every item before it is told, and finds differences.
pub(crate) trait Listener: Send {
    fn hear(&mut self, item: &mut Item) -> Verdict;
    /// A call begins.
    fn called(&mut self) {}
    /// A message came, which is not heard yet.
    fn came(&mut self, _: &WatchResponse) {}
}

impl Listener for () {
    fn hear(&mut self, _: &mut Item) -> Verdict {
        Verdict::Unknown
    }
}

/// Batches of one message that are not told yet.
enum Waiting {
    Raw(u64, VecDeque<Vec<u8>>),
    Typed(u64, VecDeque<pb::KvEventBatch>),
}

pub(crate) struct Watcher<C: Calls, L: Listener> {
    pub(crate) calls: C,
    pub(crate) listener: L,
    stream: Stream,
    call: Option<C::Call>,
    waiting: Option<Waiting>,
    told: VecDeque<Item>,
    paused_until: Option<Instant>,
    pause: Duration,
    failed_at: Option<Instant>,
    /// Snapshots are asked for.
    snapshots: bool,
    /// They may name blocks alone.
    without_tokens: bool,
    /// Of whom so many take a snapshot at a time; the place that this one has.
    turns: Option<Arc<Semaphore>>,
    turn: Option<OwnedSemaphorePermit>,
    /// A call said something, this one or one before it.
    begun: bool,
    /// What the call asked for: to go on from the cursor, or a snapshot; neither is the oldest batch.
    resumes: bool,
    asked_snapshot: bool,
    /// The cursor: what comes next in which log. Known once a snapshot, or the beginning of a log, is complete.
    known: bool,
    log_id: String,
    next: u64,
}

impl<C: Calls, L: Listener> Watcher<C, L> {
    pub(crate) fn new(calls: C, listener: L, stream: Stream) -> Self {
        Self {
            calls,
            listener,
            stream,
            call: None,
            waiting: None,
            told: VecDeque::new(),
            paused_until: None,
            pause: Duration::ZERO,
            failed_at: None,
            snapshots: true,
            without_tokens: false,
            turns: None,
            turn: None,
            begun: false,
            resumes: false,
            asked_snapshot: false,
            known: false,
            log_id: String::new(),
            next: 0,
        }
    }

    /// Snapshots name blocks alone, where the publisher can leave out the rest.
    pub(crate) fn without_tokens(mut self) -> Self {
        self.without_tokens = true;
        self
    }

    /// Waits for a turn before a snapshot, but not for long: others may take theirs slowly.
    pub(crate) fn in_turn(mut self, turns: Arc<Semaphore>) -> Self {
        self.turns = Some(turns);
        self
    }

    /// Goes on behind what is known of a log, in place of a snapshot.
    pub(crate) fn resume(&mut self, log_id: &str, next: u64) {
        (self.known, self.log_id, self.next) = (true, log_id.to_owned(), next);
    }

    /// What it says next, without end. Whoever stops to wait for it loses nothing.
    pub(crate) async fn next(&mut self) -> Item {
        loop {
            while let Some(mut item) = self.told.pop_front() {
                if self.listener.hear(&mut item) != Verdict::Different {
                    return item;
                }
                self.differs(&item);
            }
            if self.waiting.is_some() {
                self.tell_batch();
            } else {
                self.step().await;
            }
        }
    }

    /// What the listener has is not the publisher's: that item is not told.
    fn differs(&mut self, item: &Item) {
        self.told.clear();
        self.known = false;
        if matches!(item, Item::Current { .. }) {
            self.void(Cause::Differs);
        }
        self.end(Cause::Differs);
    }

    /// Waits for one thing, and makes items of it.
    async fn step(&mut self) {
        if let Some(until) = self.paused_until {
            tokio::time::sleep_until(until).await;
            self.paused_until = None;
        }
        let Some(call) = &mut self.call else {
            self.listener.called();
            let request = self.request();
            if let Some(turns) = self.turns.as_ref().filter(|_| self.asked_snapshot) {
                self.turn = timeout(LONGEST_TURN, turns.clone().acquire_owned()).await.ok().and_then(Result::ok);
            }
            // The call itself waits for a connection: of somebody who never answers, too.
            match heard_within(IDLE_TIMEOUT, self.calls.watch(request)).await {
                Some(Ok(call)) => self.call = Some(call),
                Some(Err(status)) => self.end(Refusal::from(status).into()),
                None => self.end(Cause::Silent),
            }
            return;
        };
        match heard_within(IDLE_TIMEOUT, call.next()).await {
            Some(Ok(Some(message))) => {
                self.begun = true;
                self.listener.came(&message);
                if let Err(cause) = self.hear(message) {
                    self.end(cause);
                }
            }
            Some(Ok(None)) => self.end(Cause::Ended),
            Some(Err(status)) => self.end(Refusal::from(status).into()),
            None => self.end(Cause::Silent),
        }
    }

    fn request(&mut self) -> pb::WatchRequest {
        (self.resumes, self.asked_snapshot) = (self.known, self.snapshots && !self.known);
        let mode = if self.asked_snapshot { WatchMode::Snapshot } else { WatchMode::Tail };
        let encoding = if self.stream.typed { pb::WatchEncoding::Typed } else { pb::WatchEncoding::Raw };
        pb::WatchRequest {
            engine: self.stream.engine.clone(),
            dp: self.stream.dp,
            log_id: if self.known { self.log_id.clone() } else { String::new() },
            from_sequence: self.known.then_some(self.next),
            mode: mode.into(),
            encoding: encoding.into(),
            without_tokens: self.without_tokens,
            ..Default::default()
        }
    }

    fn hear(&mut self, message: WatchResponse) -> Result<(), Cause> {
        match message.kind {
            Some(Kind::Begin(begin)) => self.hear_begin(begin),
            Some(Kind::Snapshot(part)) => self.hear_snapshot(part),
            Some(Kind::Raw(raw)) => {
                self.reaches(raw.first_sequence)?;
                self.waiting = Some(Waiting::Raw(raw.first_sequence, raw.payloads.into()));
                Ok(())
            }
            Some(Kind::Typed(typed)) => {
                self.reaches(typed.first_sequence)?;
                self.waiting = Some(Waiting::Typed(typed.first_sequence, typed.batches.into()));
                Ok(())
            }
            Some(Kind::Dropped(dropped)) => {
                // AllBlocksCleared follows in the log.
                self.reaches(dropped.first_sequence)?;
                self.next = self.next.max(dropped.last_sequence.saturating_add(1));
                Ok(())
            }
            Some(Kind::Heartbeat(beat)) => {
                if self.known {
                    let lag = beat.next_sequence.saturating_sub(self.next);
                    self.tell_current(beat.state, lag);
                }
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn hear_begin(&mut self, begin: pb::WatchBegin) -> Result<(), Cause> {
        let log_id = begin.stream.unwrap_or_default().log_id;
        let (before, resumed) = (std::mem::replace(&mut self.log_id, log_id), self.known);
        if !before.is_empty() && before != self.log_id {
            let cause = Cause::NewLog(before, self.log_id.clone());
            self.void(cause.clone());
            if resumed {
                return Err(cause);
            }
        }
        if !self.known && !self.snapshots {
            self.begin_at(begin.first_sequence, begin.first_sequence == 0);
        }
        Ok(())
    }

    /// Begins empty where no snapshot is kept.
    fn begin_at(&mut self, next: u64, whole: bool) {
        (self.known, self.next) = (true, next);
        self.told.push_back(Item::Reset { log_id: self.log_id.clone(), whole });
        self.tell_events(Vec::new(), true, None);
    }

    fn hear_snapshot(&mut self, part: pb::SnapshotPart) -> Result<(), Cause> {
        if part.index == 0 {
            self.known = false;
            self.told.push_back(Item::Reset { log_id: self.log_id.clone(), whole: true });
        }
        if self.known {
            return Ok(());
        }
        let mut events: Vec<Event> = part.events.into_iter().map(Event::from).collect();
        for payload in part.payloads {
            events.append(&mut decode_batch(&payload)?.events);
        }
        (self.known, self.next) = (part.last, part.next_sequence);
        if part.last {
            self.turn = None;
        }
        self.tell_events(events, part.last, part.state.clone());
        if part.state.is_some() {
            self.tell_current(part.state, 0);
        }
        Ok(())
    }

    /// Tells one of the batches that wait.
    fn tell_batch(&mut self) {
        let (sequence, batch) = match &mut self.waiting {
            Some(Waiting::Raw(sequence, payloads)) => {
                (sequence, payloads.pop_front().map(|payload| decode_batch(&payload)))
            }
            Some(Waiting::Typed(sequence, batches)) => {
                (sequence, batches.pop_front().map(|batch| Ok(Batch::from(batch))))
            }
            None => return,
        };
        let Some(batch) = batch else {
            self.waiting = None;
            return;
        };
        let at = *sequence;
        *sequence += 1;
        if at < self.next {
            return;
        }
        match batch {
            Ok(batch) => {
                self.next += 1;
                self.tell_events(batch.events, true, None);
            }
            Err(error) => {
                // What it said is lost: only a snapshot knows. Where none is kept, asking again says the same.
                self.void(error.clone().into());
                if self.snapshots {
                    self.end(error.into());
                } else {
                    self.begin_at(at + 1, false);
                }
            }
        }
    }

    /// Fails where batches between the cursor and `first` are missing. What is known stays true, of a moment ago.
    fn reaches(&mut self, first: u64) -> Result<(), Cause> {
        if self.known && first <= self.next {
            return Ok(());
        }
        self.known = false;
        Err(Cause::Gap(self.next, first))
    }

    fn tell_events(&mut self, events: Vec<Event>, complete: bool, state: Option<pb::StateDigest>) {
        let (log_id, next_sequence) = (self.log_id.clone(), self.next);
        self.told.push_back(Item::Events { log_id, next_sequence, events, complete, state });
    }

    fn tell_current(&mut self, state: Option<pb::StateDigest>, lag: u64) {
        self.told.push_back(Item::Current { log_id: self.log_id.clone(), next_sequence: self.next, state, lag });
    }

    fn void(&mut self, cause: Cause) {
        self.known = false;
        self.told.push_back(Item::Void(cause));
    }

    /// The call is over. Decides what that means, and how long to wait before the next; docs/followers.md has the table.
    fn end(&mut self, cause: Cause) {
        (self.call, self.waiting, self.turn) = (None, None, None);
        let refusal = match &cause {
            Cause::Refused(refusal) => Some(refusal.clone()),
            _ => None,
        };
        if matches!(cause, Cause::Silent) || refusal.as_ref().is_some_and(|refusal| refusal.code == Code::Unavailable) {
            self.calls.leave();
        }
        let reason = refusal.as_ref().map_or(ErrorReason::Unspecified, |refusal| refusal.reason);
        let mut is_refused = refusal.is_some();
        if matches!(reason, ErrorReason::StaleLog | ErrorReason::EventsSequenceInFuture) {
            self.void(cause.clone());
            self.log_id.clear();
        }
        if matches!(reason, ErrorReason::StaleLog | ErrorReason::EventsSequenceInFuture | ErrorReason::EventsCompacted)
        {
            (self.known, self.snapshots) = (false, true);
            if self.resumes {
                return;
            }
            is_refused = false;
        }
        if self.asked_snapshot && refusal.as_ref().is_some_and(Refusal::keeps_none) {
            self.snapshots = false;
            return;
        }
        // Whoever answers next may keep snapshots.
        self.snapshots |= !self.known;
        let lasting = is_refused && refusal.as_ref().is_some_and(|refusal| refusal.is_lasting(self.begun));
        self.told.push_back(Item::Failed { cause, lasting });
        let asked = refusal.and_then(|refusal| refusal.retry_after).unwrap_or_default().min(LONGEST_ASKED);
        let pause = asked + self.next_pause();
        self.paused_until = Some(Instant::now() + pause);
    }

    /// Doubles from failure to failure.
    fn next_pause(&mut self) -> Duration {
        let now = Instant::now();
        if self.failed_at.is_some_and(|at| now - at > CALM) {
            self.pause = Duration::ZERO;
        }
        self.failed_at = Some(now);
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.pause / 2 + (self.pause / 2).mul_f64(fastrand::f64())
    }
}
