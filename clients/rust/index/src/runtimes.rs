//! The threads of the process: those that answer, and those that follow engines, which give way to them.

use std::future::Future;

use tokio::runtime::{Builder, Handle, Runtime};

/// So much nicer are those that follow: of a processor that questions could fill they still have a quarter.
#[cfg(target_os = "linux")]
const NICER: i32 = 5;
#[cfg(target_os = "linux")]
const NICEST: i32 = 19;

/// A question takes microseconds, and somebody waits for it; events come by the thousand, and may be a moment late.
pub struct Runtimes {
    answering: Runtime,
    following: Runtime,
}

impl Runtimes {
    /// As many threads answer as there are processors, and half as many follow: fewer wake each other less.
    pub fn new() -> Result<Self, String> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let why = |error: std::io::Error| format!("its threads cannot be started: {error}");
        let mut answering = Builder::new_multi_thread();
        answering.worker_threads(processors).thread_name("kvgrpc-answers").enable_all();
        let mut following = Builder::new_multi_thread();
        following.worker_threads(processors.div_ceil(2)).thread_name("kvgrpc-follows").enable_all();
        following.on_thread_start(give_way);
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

/// This thread runs after those that answer. Where the system has no priorities of threads, it runs like them.
#[cfg(target_os = "linux")]
fn give_way() {
    use rustix::process::{getpriority_process, setpriority_process};
    if let Ok(nice) = getpriority_process(None) {
        let _ = setpriority_process(None, (nice + NICER).min(NICEST));
    }
}

#[cfg(not(target_os = "linux"))]
fn give_way() {}
