//! A publisher that answers its calls one after the other, in a time of its own.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::pb::{self, watch_response::Kind, WatchRequest, WatchResponse};
use crate::watch::{Calls, Cause, Item, Messages, Stream, Watcher};
use crate::{Cache, Place};

/// What one call says, and how it ends; None: nothing comes, the call itself does not return.
pub(super) type Answers = Option<(Vec<WatchResponse>, Option<Status>)>;

#[derive(Default)]
pub(super) struct Script {
    pub(super) calls: VecDeque<Answers>,
    pub(super) requests: Vec<(Instant, WatchRequest)>,
    /// How often a connection was left.
    pub(super) left: usize,
}

pub(super) struct Said(pub(super) VecDeque<WatchResponse>, pub(super) Option<Status>);

impl Calls for &mut Script {
    type Call = Said;

    async fn watch(&mut self, request: WatchRequest) -> Result<Said, Status> {
        self.requests.push((Instant::now(), request));
        match self.calls.pop_front().flatten() {
            Some((said, end)) => Ok(Said(said.into(), end)),
            None => std::future::pending().await,
        }
    }

    fn leave(&mut self) {
        self.left += 1;
    }
}

impl Messages for Said {
    async fn next(&mut self) -> Result<Option<WatchResponse>, Status> {
        match self.0.pop_front() {
            Some(message) => Ok(Some(message)),
            None => self.1.take().map_or(Ok(None), Err),
        }
    }
}

pub(super) fn said(end: Option<Status>, messages: impl Into<Vec<WatchResponse>>) -> Answers {
    Some((messages.into(), end))
}

pub(super) fn broken() -> Option<Status> {
    Some(Status::unavailable("broken"))
}

pub(super) fn refused(code: Code, reason: &str) -> Option<Status> {
    let metadata = [("log".to_owned(), "a".to_owned())];
    let details = ErrorDetails::with_error_info(format!("ERROR_REASON_{reason}"), "kvgrpc.dev", metadata);
    Some(Status::with_error_details(code, "refused", details))
}

fn response(kind: Kind) -> WatchResponse {
    WatchResponse { kind: Some(kind) }
}

pub(super) fn begin(log: &str, first: u64) -> WatchResponse {
    let stream = pb::EventStream { log_id: log.into(), next_sequence: first, ..Default::default() };
    response(Kind::Begin(pb::WatchBegin { stream: Some(stream), first_sequence: first }))
}

/// A part of a snapshot that holds one block more.
pub(super) fn storing(next: u64, index: u32, last: bool, hash: u8) -> WatchResponse {
    coming_to(next, index, last, hash, None)
}

pub(super) fn coming_to(next: u64, index: u32, last: bool, hash: u8, state: Option<pb::StateDigest>) -> WatchResponse {
    let payloads = vec![stored(hash)];
    let part = pb::SnapshotPart { next_sequence: next, index, last, payloads, state, ..Default::default() };
    response(Kind::Snapshot(part))
}

pub(super) fn snapshot_end(next: u64, index: u32, state: pb::StateDigest) -> WatchResponse {
    let part = pb::SnapshotPart { next_sequence: next, index, last: true, state: Some(state), ..Default::default() };
    response(Kind::Snapshot(part))
}

pub(super) fn batches(first_sequence: u64, payloads: impl Into<Vec<Vec<u8>>>) -> WatchResponse {
    response(Kind::Raw(pb::RawBatches { first_sequence, payloads: payloads.into() }))
}

pub(super) fn hole(first_sequence: u64, last_sequence: u64) -> WatchResponse {
    response(Kind::Dropped(pb::DroppedRange { first_sequence, last_sequence, ..Default::default() }))
}

pub(super) fn heartbeat(next_sequence: u64, state: Option<pb::StateDigest>) -> WatchResponse {
    response(Kind::Heartbeat(pb::WatchHeartbeat { next_sequence, state, load: None }))
}

/// [1.0, [["BlockStored", [hash], nil, nil, 1]], 0]
pub(super) fn stored(hash: u8) -> Vec<u8> {
    let head = [0x93, 0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0, 0x91, 0x95, 0xab];
    [&head, b"BlockStored".as_slice(), &[0x91, hash, 0xc0, 0xc0, 1, 0]].concat()
}

/// [1.0, [["BlockRemoved", [hash]]], 0]
pub(super) fn removed(hash: u8) -> Vec<u8> {
    let head = [0x93, 0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0, 0x91, 0x92, 0xac];
    [&head, b"BlockRemoved".as_slice(), &[0x91, hash, 0]].concat()
}

/// What a follower tells of some calls, each item with the blocks 1 to 9 that its cache holds then. It ends when nobody answers.
pub(super) async fn shown(script: &mut Script) -> Vec<String> {
    let mut follower = Watcher::new(script, Cache::new(), Stream::default());
    let mut items = Vec::new();
    loop {
        let name = match follower.next().await {
            Item::Failed { cause: Cause::Silent, .. } => return items,
            Item::Failed { .. } => continue,
            Item::Void(_) => "void".to_owned(),
            Item::Reset { .. } => "reset".to_owned(),
            Item::Events { next_sequence, .. } => format!("events {next_sequence}"),
            Item::Current { next_sequence, lag, .. } => format!("current {next_sequence}+{lag}"),
        };
        items.push(format!("{name}: {}", held(&follower.listener)).trim_end().to_owned());
    }
}

pub(super) fn held(cache: &Cache) -> String {
    let device = Place::new("", 0);
    (1..10).filter(|hash| cache.holds(&device, &crate::BlockHash::Value(*hash))).map(|hash| hash.to_string()).collect()
}

pub(super) const A_WHILE: Duration = Duration::from_secs(40);
