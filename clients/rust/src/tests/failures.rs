//! What a follower does about each failure: the table of docs/followers.md, as tests/conformance/events/failures.json has it.

use std::time::Duration;

use serde_json::Value as Json;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::golden;
use super::script::*;
use crate::pb::WatchMode;
use crate::watch::{Item, Stream, Watcher};
use crate::Cache;

fn code_of(name: &str) -> Code {
    let words: String = name.split('_').map(|word| word[..1].to_owned() + &word[1..].to_lowercase()).collect();
    (1..17).map(Code::from).find(|code| format!("{code:?}") == words).unwrap()
}

fn refusal(row: &Json, status: &str) -> Option<Status> {
    let words: Vec<&str> = status.split(' ').chain(["", ""]).collect();
    let mut details = ErrorDetails::new();
    if !words[1].is_empty() {
        let field = [("field".to_owned(), words[2].to_owned())];
        details.set_error_info(format!("ERROR_REASON_{}", words[1]), "kvgrpc.dev", field);
    }
    if let Some(seconds) = row["retry_seconds"].as_u64() {
        details.set_retry_info(Some(Duration::from_secs(seconds)));
    }
    Some(Status::with_error_details(code_of(words[0]), "refused", details))
}

/// What a follower does about the last of some calls, in the words of the table.
async fn does(row: &Json, calls: Vec<Answers>) -> String {
    let last = calls.len();
    let mut script = Script { calls: calls.into(), ..Default::default() };
    let (mut lasting, mut held_then) = (false, String::new());
    {
        let mut follower = Watcher::new(&mut script, Cache::new(), Stream::default());
        while let Ok(item) = tokio::time::timeout(Duration::from_secs(100), follower.next()).await {
            held_then = held(&follower.listener);
            match item {
                Item::Failed { lasting: is, cause: crate::Cause::Refused(_) } => lasting = is,
                Item::Failed { .. } => break,
                _ => {}
            }
        }
    }
    let (at, request) = &script.requests[last];
    let pause = *at - script.requests[last - 1].0;
    let mode = if request.mode() == WatchMode::Tail { "TAIL" } else { "SNAPSHOT" };
    let mut words = vec![if held_then == "1" { "keep".to_owned() } else { "forget".to_owned() }];
    if pause.is_zero() {
        words.push(format!("at once {mode}"));
    } else {
        let least = Duration::from_secs(row["waits_seconds"].as_u64().unwrap_or(0));
        assert!(
            pause >= least + Duration::from_millis(50) && pause <= least + Duration::from_secs(2),
            "{row}: {pause:?}"
        );
        words.extend(["pause".to_owned(), mode.to_owned()]);
    }
    if lasting {
        words.push("lasting".to_owned());
    }
    words.join(", ")
}

#[tokio::test(start_paused = true)]
async fn a_follower_does_what_the_table_says() {
    let rows = golden("failures.json");
    assert!(rows.as_array().unwrap().len() >= 9);
    for row in rows.as_array().unwrap() {
        for status in row["statuses"].as_array().unwrap() {
            let refused = said(refusal(row, status.as_str().unwrap()), []);
            let known = said(broken(), [begin("a", 1), storing(1, 0, true, 1)]);
            assert_eq!(does(row, vec![known, refused.clone()]).await, row["cursor"], "{status} from the cursor");
            let first = does(row, vec![refused]).await;
            assert_eq!(first.split_once(", ").unwrap().1, row["first"], "{status} first");
        }
    }
}

#[test]
fn a_reason_of_another_domain_is_not_ours() {
    let details = ErrorDetails::with_error_info("ERROR_REASON_STALE_LOG", "example.com", []);
    let refusal = crate::Refusal::from(Status::with_error_details(Code::NotFound, "theirs", details));
    assert_eq!((refusal.reason, refusal.metadata.len()), (crate::pb::ErrorReason::Unspecified, 0));
}
