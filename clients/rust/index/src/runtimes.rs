//! The threads of the process: those that answer, and those that follow engines.

use std::future::Future;

use tokio::runtime::{Builder, Handle, Runtime};

/// A question takes microseconds, and somebody waits for it; events come by the thousand, and may be a moment late.
/// No thread is nicer than another: one that is kept from its processor while it writes to the table keeps all
/// questions waiting.
pub struct Runtimes {
    answering: Runtime,
    following: Runtime,
}

impl Runtimes {
    /// Of each half as many threads as there are processors: fewer wake each other less. On two, one that answers is asked more in
    /// a second than two are, and its slowest answers come sooner.
    pub fn new() -> Result<Self, String> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).div_ceil(2);
        let why = |error: std::io::Error| format!("its threads cannot be started: {error}");
        let mut answering = Builder::new_multi_thread();
        answering.worker_threads(threads).thread_name("kvgrpc-answers").enable_all();
        let mut following = Builder::new_multi_thread();
        following.worker_threads(threads).thread_name("kvgrpc-follows").enable_all();
        Ok(Self { answering: answering.build().map_err(why)?, following: following.build().map_err(why)? })
    }

    /// Runs a task until it is over. It is told where followers run.
    pub fn run<F: Future>(self, task: impl FnOnce(Handle) -> F) -> F::Output {
        let done = self.answering.block_on(task(self.following.handle().clone()));
        self.following.shutdown_background();
        self.answering.shutdown_background();
        done
    }
}
