//! The rules of docs/followers.md, over calls that answer at once.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::script::*;
use crate::pb::{StateDigest, TierDigest, WatchMode, WatchRequest, WatchResponse};
use crate::watch::{Calls, Cause, Item, Messages, Stream, Watcher};

async fn tells(calls: impl Into<Vec<Answers>>, expected: &[&str]) -> Script {
    let mut script = Script { calls: calls.into().into(), ..Default::default() };
    let items = tokio::time::timeout(A_WHILE, shown(&mut script)).await.unwrap();
    assert_eq!(items, expected);
    script
}

fn wrong(next_sequence: u64) -> StateDigest {
    let tier = TierDigest { medium: "GPU".into(), blocks: 7, ..Default::default() };
    StateDigest { next_sequence, tiers: vec![tier], ..Default::default() }
}

#[tokio::test(start_paused = true)]
async fn what_is_known_is_shown_until_a_snapshot_is_complete() {
    let overtaken = [
        begin("a", 9),
        storing(9, 0, false, 4),
        storing(10, 0, false, 5),
        storing(10, 1, true, 6),
        batches(10, [stored(7)]),
    ];
    let calls = [
        said(broken(), [begin("a", 1), storing(1, 0, true, 1), batches(1, [stored(2)])]),
        said(refused(Code::OutOfRange, "EVENTS_COMPACTED"), []),
        said(broken(), [begin("a", 9), storing(9, 0, false, 3)]),
        said(broken(), overtaken),
    ];
    let expected = [
        "reset:",
        "events 1: 1",
        "events 2: 12",
        "reset: 12",
        "events 9: 12",
        "reset: 12",
        "events 9: 12",
        "reset: 12",
        "events 10: 12",
        "events 10: 56",
        "events 11: 567",
    ];
    tells(calls, &expected).await;
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_does_not_come_to_its_own_digest_is_not_shown() {
    let calls = [
        said(broken(), [begin("a", 1), storing(1, 0, true, 1)]),
        said(refused(Code::OutOfRange, "EVENTS_COMPACTED"), []),
        said(None, [begin("a", 9), coming_to(9, 0, true, 3, Some(wrong(9))), batches(9, [stored(4)])]),
        said(None, [begin("a", 9), storing(9, 0, true, 5)]),
    ];
    tells(calls, &["reset:", "events 1: 1", "reset: 1", "reset: 1", "events 9: 5"]).await;
}

#[tokio::test(start_paused = true)]
async fn what_is_void_is_forgotten_before_the_next_call() {
    let known = || vec![begin("a", 1), storing(1, 0, true, 1)];
    let and = |more: crate::pb::WatchResponse| [known(), vec![more, batches(1, [stored(2)])]].concat();
    let calls = [
        vec![said(broken(), known()), said(refused(Code::Aborted, "STALE_LOG"), [])],
        vec![said(broken(), known()), said(refused(Code::OutOfRange, "EVENTS_SEQUENCE_IN_FUTURE"), [])],
        vec![said(broken(), known()), said(None, [begin("b", 1), batches(1, [stored(2)])])],
        vec![said(None, and(batches(1, [vec![0xc1], stored(2)])))],
        vec![said(None, and(heartbeat(1, Some(wrong(1)))))],
    ];
    for calls in calls {
        let next = said(None, [begin("b", 2), storing(2, 0, true, 3)]);
        let mut script = Script { calls: [calls, vec![next]].concat().into(), ..Default::default() };
        let mut items = shown(&mut script).await;
        items.dedup();
        assert_eq!(items, ["reset:", "events 1: 1", "void:", "reset:", "events 2: 3"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_of_another_log_ends_what_was_shown_of_the_first() {
    let calls = [
        said(broken(), [begin("a", 1), storing(1, 0, true, 1)]),
        said(refused(Code::OutOfRange, "EVENTS_COMPACTED"), []),
        said(None, [begin("b", 2), storing(2, 0, true, 3)]),
    ];
    tells(calls, &["reset:", "events 1: 1", "void:", "reset:", "events 2: 3"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_repeat_is_passed_over_and_what_follows_it_is_taken() {
    let messages = [
        begin("a", 2),
        storing(2, 0, true, 1),
        batches(1, [stored(9), stored(2)]),
        hole(0, 1),
        batches(3, [stored(3)]),
    ];
    let script = tells([said(broken(), messages)], &["reset:", "events 2: 1", "events 3: 12", "events 4: 123"]).await;
    let (_, second) = &script.requests[1];
    assert_eq!((second.mode(), &*second.log_id, second.from_sequence), (WatchMode::Tail, "a", Some(4)));
}

#[tokio::test(start_paused = true)]
async fn what_lies_behind_a_gap_or_within_a_snapshot_is_not_taken() {
    let whole = || vec![begin("a", 2), storing(2, 0, true, 1)];
    let within = || [whole(), vec![storing(3, 0, false, 8)]].concat();
    for early in [batches(3, [stored(9)]), hole(3, 4)] {
        for (first, told) in [(whole(), vec![]), (within(), vec!["reset: 1", "events 3: 1"])] {
            let messages = [first, vec![early.clone(), batches(5, [stored(9)])]].concat();
            let again = said(None, [begin("a", 5), storing(5, 0, true, 5)]);
            let expected = [vec!["reset:", "events 2: 1"], told, vec!["reset: 1", "events 5: 5"]].concat();
            let script = tells([said(None, messages), again], &expected).await;
            assert_eq!(script.requests[1].1.mode(), WatchMode::Snapshot);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_heartbeat_under_load_says_how_much_is_missing() {
    let messages = [begin("a", 2), storing(2, 0, true, 1), heartbeat(7, None)];
    tells([said(broken(), messages)], &["reset:", "events 2: 1", "current 2+5: 1"]).await;
}

#[tokio::test(start_paused = true)]
async fn who_reads_no_snapshot_begins_empty_at_the_oldest_batch() {
    let calls = [
        said(broken(), [begin("a", 2), storing(2, 0, true, 1)]),
        said(refused(Code::OutOfRange, "EVENTS_COMPACTED"), []),
        said(refused(Code::Unimplemented, "FEATURE_DISABLED"), []),
        said(broken(), [begin("a", 7), batches(7, [stored(7)])]),
    ];
    tells(calls, &["reset:", "events 2: 1", "reset: 1", "events 7:", "events 8: 7"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_cannot_be_read_is_passed_where_no_snapshot_makes_up_for_it() {
    let calls = [
        said(refused(Code::Unimplemented, "FEATURE_DISABLED"), []),
        said(broken(), [begin("a", 0), batches(0, [stored(1), vec![0xc1], stored(3)])]),
    ];
    let expected = ["reset:", "events 0:", "events 1: 1", "void:", "reset:", "events 2:", "events 3: 3"];
    let script = tells(calls, &expected).await;
    assert_eq!(script.requests[2].1.from_sequence, Some(3));
}

#[tokio::test(start_paused = true)]
async fn a_new_log_may_have_snapshots_where_the_one_before_had_none() {
    let calls = [
        said(refused(Code::Unimplemented, "FEATURE_DISABLED"), []),
        said(None, [begin("a", 3), batches(3, [stored(1)])]),
        said(refused(Code::Aborted, "STALE_LOG"), []),
        said(None, [begin("b", 9), storing(9, 0, true, 2)]),
    ];
    tells(calls, &["reset:", "events 3:", "events 4: 1", "void:", "reset:", "events 9: 2"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_call_that_nobody_takes_is_left_within_five_seconds_for_another_connection() {
    let mut script = Script { calls: [None, None].into(), ..Default::default() };
    let mut follower = Watcher::new(&mut script, (), Stream::default());
    let began = Instant::now();
    assert!(matches!(follower.next().await, Item::Failed { cause: Cause::Silent, lasting: false }));
    assert_eq!(began.elapsed().as_secs(), 5);
    drop(follower);
    assert_eq!(script.left, 1);
}

#[tokio::test(start_paused = true)]
async fn the_time_that_a_reader_takes_is_not_the_publishers() {
    let mut script = Script::default();
    script.calls.push_back(said(broken(), [begin("a", 1), storing(1, 0, false, 1), storing(1, 1, true, 2)]));
    let mut follower = Watcher::new(&mut script, (), Stream::default());
    let mut complete = Vec::new();
    while complete.len() < 2 {
        if let Item::Events { complete: is, .. } = follower.next().await {
            complete.push(is);
            tokio::time::sleep(std::time::Duration::from_secs(9)).await;
        }
    }
    assert_eq!(complete, [false, true]);
}

/// Its last message comes then.
struct Late {
    said: VecDeque<WatchResponse>,
    comes: Instant,
}

impl Calls for Late {
    type Call = Self;

    async fn watch(&mut self, _: WatchRequest) -> Result<Self, Status> {
        Ok(Self { said: std::mem::take(&mut self.said), comes: self.comes })
    }
}

impl Messages for Late {
    async fn next(&mut self) -> Result<Option<WatchResponse>, Status> {
        if self.said.len() < 2 {
            tokio::time::sleep_until(self.comes).await;
        }
        match self.said.pop_front() {
            Some(message) => Ok(Some(message)),
            None => std::future::pending().await,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_publisher_is_not_left_for_a_while_in_which_its_follower_did_not_run() {
    let (runs, held) = (Duration::from_secs(2), Duration::from_secs(20));
    // What came meanwhile is read a moment after the follower runs again.
    let comes = Instant::now() + runs + held + Duration::from_millis(90);
    let late = Late { said: [begin("a", 1), storing(1, 0, true, 1), heartbeat(1, None)].into(), comes };
    let mut follower = Watcher::new(late, (), Stream::default());
    let hears = async {
        loop {
            match follower.next().await {
                Item::Current { .. } => break,
                Item::Failed { cause, .. } => panic!("{cause}"),
                _ => {}
            }
        }
    };
    let is_held = async {
        tokio::time::sleep(runs).await;
        tokio::time::advance(held).await;
    };
    tokio::join!(hears, is_held);
}

#[tokio::test(start_paused = true)]
async fn who_stops_to_wait_loses_nothing() {
    let mut script = Script::default();
    for next in 1..4 {
        script
            .calls
            .push_back(said(Some(Status::internal("reset by a proxy")), [begin("a", next), storing(next, 0, true, 1)]));
        script.calls.push_back(said(refused(Code::OutOfRange, "EVENTS_COMPACTED"), []));
    }
    let mut follower = Watcher::new(&mut script, (), Stream::default());
    let mut nexts = Vec::new();
    while nexts.last() != Some(&3) {
        // Shorter than each pause.
        match tokio::time::timeout(std::time::Duration::from_millis(7), follower.next()).await {
            Ok(Item::Events { next_sequence, .. }) => nexts.push(next_sequence),
            Ok(Item::Failed { lasting, .. }) => assert!(!lasting),
            _ => {}
        }
    }
    assert_eq!(nexts, [1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_waits_for_its_turn_and_not_for_long() {
    let (turns, [mut first, mut second]) = (Arc::new(Semaphore::new(1)), [Script::default(), Script::default()]);
    for script in [&mut first, &mut second] {
        script.calls.push_back(said(None, [begin("a", 1), storing(1, 0, false, 1), storing(1, 1, true, 2)]));
    }
    let mut one = Watcher::new(&mut first, (), Stream::default()).in_turn(turns.clone());
    while !matches!(one.next().await, Item::Events { complete: false, .. }) {}
    let (began, mut other) = (Instant::now(), Watcher::new(&mut second, (), Stream::default()).in_turn(turns.clone()));
    assert!(matches!(other.next().await, Item::Reset { .. }));
    assert_eq!(began.elapsed().as_secs(), 2);
    assert_eq!(turns.available_permits(), 0);
    while !matches!(one.next().await, Item::Events { complete: true, .. }) {}
    assert_eq!(turns.available_permits(), 1);
}
