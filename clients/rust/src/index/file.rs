//! Calls of a file system, which may hang for ever.

use std::fmt::Display;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;

/// On a thread that nobody waits for after so long, not the runtime's end either; why there is no answer.
pub(crate) async fn on_a_thread<T: Send + 'static, E: Display + Send + 'static>(
    within: Duration,
    call: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, String> {
    let (say, said) = oneshot::channel();
    std::thread::Builder::new()
        .name("kvgrpc-saved".to_owned())
        .spawn(move || drop(say.send(call().map_err(|error| error.to_string()))))
        .map_err(|error| error.to_string())?;
    match timeout(within, said).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) => Err("its thread ended".to_owned()),
        Err(_) => Err(format!("the file system did not answer within {} s", within.as_secs())),
    }
}
