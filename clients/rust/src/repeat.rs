//! Calls that may be repeated are, while the server is away or asks for time.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::time::Duration;

use tokio::time::{timeout_at, Instant};
use tonic::{Code, Request, Response, Status};

use crate::pb::ErrorReason;
use crate::refusal::Refusal;

/// A host that vanished closes nothing: every call has a deadline.
pub(crate) const USUAL_TIMEOUT: Duration = Duration::from_secs(10);
pub(crate) const MOST_PAGE_ROWS: u32 = 1000;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Makes an idempotent call, again until `within` is over. The refusal is the last one.
pub(crate) async fn ask<M: Clone, R, F: Future<Output = Result<Response<R>, Status>>>(
    within: Duration,
    message: M,
    call: impl Fn(Request<M>) -> F,
) -> Result<R, Refusal> {
    let deadline = Instant::now() + within;
    let mut longest = FIRST_PAUSE;
    loop {
        let mut request = Request::new(message.clone());
        request.set_timeout(deadline.saturating_duration_since(Instant::now()));
        let late = |_| Status::deadline_exceeded(format!("no answer within {} s", within.as_secs_f64()));
        let refusal = match timeout_at(deadline, call(request)).await.map_err(late) {
            Ok(Ok(response)) => return Ok(response.into_inner()),
            Ok(Err(status)) | Err(status) => Refusal::from(status),
        };
        let pause = longest.mul_f64(fastrand::f64()).max(refusal.retry_after.unwrap_or_default());
        // An attempt that has a shorter time of its own is not the last.
        let may_repeat = refusal.may_repeat() || refusal.code == Code::DeadlineExceeded;
        if !may_repeat || Instant::now() + pause >= deadline {
            return Err(refusal);
        }
        tokio::time::sleep(pause).await;
        longest = (2 * longest).min(LONGEST_PAUSE);
    }
}

/// What nobody answered in time.
pub(crate) fn silent() -> Refusal {
    Status::deadline_exceeded("nothing came in time").into()
}

/// The pages of one list, by the tokens that name them: a server that names one again has a list without an end.
#[derive(Default)]
pub(crate) struct Pages(HashSet<String>);

impl Pages {
    /// Whether there is a next page, which `token` names. Refuses one that was named before.
    pub(crate) fn go_on(&mut self, token: &str) -> Result<bool, Refusal> {
        if token.is_empty() || self.0.insert(token.to_owned()) {
            return Ok(!token.is_empty());
        }
        Err(Refusal {
            code: Code::Internal,
            message: "the server names a page that it named before: its list has no end".to_owned(),
            reason: ErrorReason::Internal,
            metadata: HashMap::new(),
            retry_after: None,
        })
    }
}
