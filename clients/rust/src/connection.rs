//! A channel to one kvgrpc process.

use std::time::Duration;

use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};

use crate::refusal::Refusal;
use crate::token::{target_of, Authorize, SHORTEST_SECRET};

/// What a publisher may say before its follower has taken it. An index follows thousands, and its snapshots come all at once: with
/// the two megabytes of tonic's clients it would hold all of them in memory while it takes one.
const FOLLOWED_BYTES: u32 = 64 << 10;
/// All streams of a connection together. h2 ends a connection on which small frames of half as many bytes, each counted as 256,
/// wait to be read: heartbeats of 64 streams for 30 s here. With FOLLOWED_BYTES it was 2 s: a follower that did not run for so
/// long lost all of its connections.
const CONNECTION_BYTES: u32 = 1 << 20;

/// A channel on which every call carries a token; the generated clients take it.
pub type AuthorizedChannel = InterceptedService<Channel, Authorize>;

/// How a process is dialled.
#[derive(Clone, Default)]
pub struct Options {
    /// What tokens are made with; None: calls carry none.
    pub secret: Option<String>,
    /// What tokens name, where the address leads there by a tunnel; None: the address.
    pub audience: Option<String>,
    /// Tokens may go to another host in plaintext.
    pub insecure: bool,
    /// TLS; None: plaintext.
    #[cfg(feature = "tls")]
    pub tls: Option<tonic::transport::ClientTlsConfig>,
}

/// Why there is no channel, or no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address is none.
    #[error("address {0:?}: \"host:port\" or \"unix:/path\" is needed")]
    Address(String),
    /// The secret can be guessed from the tokens that it makes.
    #[error("the secret has {0} characters: at least 16 are needed (openssl rand -hex 32)")]
    ShortSecret(usize),
    /// A token would be readable on its way.
    #[error("a token for {0} would travel in plaintext: use TLS, or set insecure in a network that you trust")]
    Plaintext(String),
    /// Nobody listens, or TLS fails.
    #[error("{0} does not answer: {1}")]
    Unreachable(String, tonic::transport::Error),
    /// Nothing is named that an index could follow.
    #[error("registries and sources are empty: name a registry, or ranks")]
    NothingToFollow,
    /// The server refused a call.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

/// Opens a channel to "host:port" or "unix:/path", and waits until it stands.
pub async fn connect(address: &str, options: Options) -> Result<AuthorizedChannel, Error> {
    let dialer = Dialer::new(address, options)?;
    let channel = dialer.endpoint.connect().await.map_err(|error| Error::Unreachable(dialer.target.clone(), error))?;
    Ok(dialer.authorized(channel))
}

/// One process, and how it is dialled: as often as followers need it.
#[derive(Clone)]
pub struct Dialer {
    target: String,
    endpoint: Endpoint,
    authorize: Authorize,
}

impl Dialer {
    /// Checks the address and the options, and dials nobody.
    pub fn new(address: &str, options: Options) -> Result<Self, Error> {
        let target = target_of(address).ok_or_else(|| Error::Address(address.to_owned()))?;
        if let Some(secret) = &options.secret {
            if secret.chars().count() < SHORTEST_SECRET {
                return Err(Error::ShortSecret(secret.chars().count()));
            }
            if !options.insecure && !is_encrypted(&options) && !is_local(&target) {
                return Err(Error::Plaintext(target));
            }
        }
        let endpoint = endpoint(&target, &options).map_err(|error| Error::Unreachable(target.clone(), error))?;
        let authorize = Authorize::new(options.secret, options.audience.unwrap_or_else(|| target.clone()));
        Ok(Self { target, endpoint, authorize })
    }

    /// A new channel, which connects with its first call, and again with the next where that failed.
    pub fn channel(&self) -> AuthorizedChannel {
        self.authorized(self.endpoint.connect_lazy())
    }

    pub(crate) fn target(&self) -> &str {
        &self.target
    }

    /// The same for who follows one of many streams.
    pub(crate) fn following(&self) -> AuthorizedChannel {
        let endpoint = self.endpoint.clone().initial_stream_window_size(FOLLOWED_BYTES);
        self.authorized(endpoint.initial_connection_window_size(CONNECTION_BYTES).connect_lazy())
    }

    fn authorized(&self, channel: Channel) -> AuthorizedChannel {
        InterceptedService::new(channel, self.authorize.clone())
    }
}

fn endpoint(target: &str, options: &Options) -> Result<Endpoint, tonic::transport::Error> {
    let uri = match target.strip_prefix("unix:") {
        Some(path) => format!("unix://{path}"),
        None if is_encrypted(options) => format!("https://{target}"),
        None => format!("http://{target}"),
    };
    let endpoint = Endpoint::from_shared(uri)?
        .connect_timeout(Duration::from_secs(5))
        .http2_keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true);
    #[cfg(feature = "tls")]
    if let Some(tls) = &options.tls {
        return endpoint.tls_config(tls.clone());
    }
    Ok(endpoint)
}

#[cfg(feature = "tls")]
fn is_encrypted(options: &Options) -> bool {
    options.tls.is_some()
}

#[cfg(not(feature = "tls"))]
fn is_encrypted(_: &Options) -> bool {
    false
}

fn is_local(target: &str) -> bool {
    let host = target.rsplit_once(':').map_or(target, |(host, _)| host);
    target.starts_with("unix") || host == "localhost" || host == "[::1]" || host.starts_with("127.")
}
