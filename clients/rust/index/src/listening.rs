//! Where it listens: a TCP port, or a socket of this host.

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use kvgrpc::target_of;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::server::{Router, TcpIncoming};
use tonic::transport::Error;

use crate::admission::Admission;
use crate::proof::Bound;

type Stack = tower_layer::Stack<Admission, tower_layer::Identity>;
type Serving = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

/// Where it was told to listen.
pub enum Listen {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// What it listens on.
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, Socket),
}

/// A socket of this process, which is taken away when this is dropped.
pub struct Socket(PathBuf);

impl Listen {
    pub async fn read(listen: &str) -> Result<Self, String> {
        match listen.strip_prefix("unix:") {
            Some(path) => Ok(Self::Unix(path.strip_prefix("//").unwrap_or(path).into())),
            None => resolved(listen).await.map(Self::Tcp),
        }
    }

    /// Whether only this host reaches it.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Tcp(address) => address.ip().is_loopback(),
            Self::Unix(_) => true,
        }
    }

    pub async fn bind(&self) -> Result<Listener, String> {
        let why = |error: std::io::Error| format!("listen: {self}: {error}");
        match self {
            Self::Tcp(address) => TcpListener::bind(address).await.map(Listener::Tcp).map_err(why),
            Self::Unix(path) => {
                if UnixStream::connect(path).await.is_ok() {
                    return Err(format!("listen: {self}: another process listens there"));
                }
                take_away(path);
                UnixListener::bind(path).map(|listener| Listener::Unix(listener, Socket(path.clone()))).map_err(why)
            }
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(formatter),
            Self::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

impl Listener {
    pub fn bound(&self) -> Result<Bound, String> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(Bound::Tcp).map_err(|error| error.to_string()),
            Self::Unix(_, Socket(path)) => {
                let target = target_of(&format!("unix:{}", path.display()));
                target.map(Bound::Unix).ok_or_else(|| "listen: a path is needed after unix:".to_owned())
            }
        }
    }

    /// Serves until `stops`.
    pub fn serve(self, server: Router<Stack>, stops: impl Future<Output = ()> + Send + 'static) -> Serving {
        match self {
            Self::Tcp(listener) => {
                // Else the end of an answer waits for the caller's acknowledgement of what came before: 40 ms, delayed as those are.
                let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
                Box::pin(server.serve_with_incoming_shutdown(incoming, stops))
            }
            Self::Unix(listener, socket) => Box::pin(async move {
                let _socket = socket;
                server.serve_with_incoming_shutdown(UnixListenerStream::new(listener), stops).await
            }),
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        take_away(&self.0);
    }
}

/// The socket that a process left; nothing else that lies there.
fn take_away(path: &Path) {
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        let _ = std::fs::remove_file(path);
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(formatter),
            Self::Unix(target) => target.fmt(formatter),
        }
    }
}

pub async fn resolved(listen: &str) -> Result<SocketAddr, String> {
    let wrong = || format!("listen: {listen:?} is no HOST:PORT that can be bound");
    let mut found = tokio::net::lookup_host(listen).await.map_err(|_| wrong())?;
    found.next().ok_or_else(wrong)
}
