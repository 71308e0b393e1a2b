//! Waits for a moment, to some microseconds. Timers of tokio wait for whole milliseconds, which are many questions, and a thread
//! that sleeps has to wake the one that asks.

#[cfg(target_os = "linux")]
pub use of_linux::Alarm;
#[cfg(not(target_os = "linux"))]
pub use of_tokio::Alarm;

#[cfg(target_os = "linux")]
mod of_linux {
    use std::io::{ErrorKind, Result};

    use rustix::time::{
        timerfd_create, timerfd_settime, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec,
    };
    use tokio::net::unix::pipe::Receiver;
    use tokio::time::Instant;

    /// A timer of the kernel's, read like a pipe.
    pub struct Alarm(Receiver);

    impl Alarm {
        pub fn new() -> Result<Self> {
            let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
            Receiver::from_owned_fd_unchecked(timer).map(Self)
        }

        pub async fn until(&self, due: Instant) -> Result<()> {
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            let it_value = Timespec::try_from(left).map_err(std::io::Error::other)?;
            let once = Itimerspec { it_interval: Timespec::default(), it_value };
            timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &once)?;
            loop {
                self.0.readable().await?;
                match self.0.try_read(&mut [0; 8]) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    read => return read.map(drop),
                }
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod of_tokio {
    use std::io::Result;

    use tokio::time::{sleep_until, Instant};

    pub struct Alarm;

    impl Alarm {
        pub fn new() -> Result<Self> {
            Ok(Self)
        }

        pub async fn until(&self, due: Instant) -> Result<()> {
            sleep_until(due).await;
            Ok(())
        }
    }
}
