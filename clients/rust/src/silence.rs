//! How long somebody said nothing. A process that does not get to run hears nobody: that time is not theirs.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use tokio::time::{timeout, Instant};

/// It looks at the clock so often, which is less often than heartbeats come. What passed since the look before counts for nothing
/// where a look is later than LATE: what came meanwhile has not been read yet.
const LOOK: Duration = Duration::from_millis(1250);
const LATE: Duration = Duration::from_millis(100);
/// However late it is itself, a process waits no longer, but for whom the silence may be longer.
const LONGEST: Duration = Duration::from_secs(60);

/// What somebody says who is not silent for so long; None: he was.
pub(crate) async fn heard_within<F: Future>(silence: Duration, says: F) -> Option<F::Output> {
    let (began, mut silent, mut says) = (Instant::now(), Duration::ZERO, pin!(says));
    while silent < silence && began.elapsed() < LONGEST.max(silence) {
        let (looked, next) = (Instant::now(), LOOK.min(silence - silent));
        if let Ok(said) = timeout(next, says.as_mut()).await {
            return Some(said);
        }
        if looked.elapsed() <= next + LATE {
            silent += looked.elapsed();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::{advance, sleep, sleep_until};

    use super::*;

    const SILENCE: Duration = Duration::from_secs(5);

    /// A process that runs for so long and is held for so long, so many times.
    async fn held(times: usize, runs: Duration, is_held: Duration) {
        for _ in 0..times {
            sleep(runs).await;
            advance(is_held).await;
        }
        pending().await
    }

    async fn seconds_until_silent(times: usize, runs: f64, is_held: f64) -> f64 {
        let began = Instant::now();
        tokio::select! {
            said = heard_within(SILENCE, pending::<()>()) => assert!(said.is_none()),
            () = held(times, Duration::from_secs_f64(runs), Duration::from_secs_f64(is_held)) => {}
        }
        began.elapsed().as_secs_f64()
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_as_long_as_it_may_be() {
        assert!((5.0..5.01).contains(&seconds_until_silent(0, 0.0, 0.0).await));
    }

    #[tokio::test(start_paused = true)]
    async fn what_came_while_the_reader_was_held_is_heard() {
        // From a second before it was silent for too long.
        for runs in [0.5, 2.0, 4.0, 4.9] {
            let runs = Duration::from_secs_f64(runs);
            let back = Instant::now() + runs + Duration::from_secs(20);
            // It lies in the socket, and is read when those before it were.
            let says = sleep_until(back + Duration::from_millis(90));
            tokio::select! {
                said = heard_within(SILENCE, says) => assert!(said.is_some(), "held after {runs:?}"),
                () = held(1, runs, Duration::from_secs(20)) => {}
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_silent_beside_a_reader_that_is_late_is_found() {
        let once = seconds_until_silent(1, 2.0, 20.0).await;
        assert!((24.0..30.0).contains(&once), "{once}");
        let always = seconds_until_silent(100, 0.5, 8.0).await;
        assert!((60.0..70.0).contains(&always), "{always}");
    }
}
