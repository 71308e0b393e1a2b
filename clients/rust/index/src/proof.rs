//! Who may call: bearer tokens made with a secret of the tokens file, for this server and this minute (docs/tokens.md), and
//! client certificates.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use kvgrpc::pb::ErrorReason;
use kvgrpc::{target_of, Secrets};
use parking_lot::Mutex;
use tonic::codegen::http::{Extensions, HeaderMap};
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo};
use tonic::{Code, Status};

use crate::names::names_in;
use crate::refusals::refused;

const CLOCK_SKEW_SECONDS: u64 = 60;

/// Lets calls in that prove a secret, or come with a certificate that gives a role; where neither is asked for, all of them.
#[derive(Clone)]
pub struct Proof {
    tokens: Option<Arc<Known>>,
    asks_certificates: bool,
}

/// Who calls: the name that its share is counted by, the host that it calls from, a role; and by which connection, None: through a
/// Unix socket.
#[derive(Clone)]
pub struct Caller {
    pub name: Arc<str>,
    pub host: String,
    pub role: String,
    pub peer: Option<SocketAddr>,
}

/// Where a server listens.
pub enum Bound {
    Tcp(SocketAddr),
    /// As [`target_of`] spells it.
    Unix(String),
}

/// Whoever may drain.
pub const OPERATOR: &str = "operator";
const ROLES: [&str; 3] = ["rank", "consumer", OPERATOR];

struct Known {
    path: String,
    audiences: Vec<String>,
    wildcard_port: Option<u16>,
    /// Whoever calls is of this host.
    is_unix: bool,
    /// The file as it was last read, and when it was written.
    read: Mutex<(Option<SystemTime>, Arc<Secrets>)>,
}

impl Proof {
    /// `listen`: where the server was told to listen, `bound`: where it does; `audience`: by what else clients dial it.
    pub fn new(
        tokens_file: Option<String>,
        asks_certificates: bool,
        listen: &str,
        bound: &Bound,
        audience: &[String],
    ) -> Result<Self, String> {
        let Some(path) = tokens_file else { return Ok(Self { tokens: None, asks_certificates }) };
        let secrets = read_tokens(&path)?;
        if secrets.is_empty() {
            return Err(format!("tokens-file: {path} has no token, a line ROLE [NAME]:SECRET: nobody could call"));
        }
        let mut audiences = Vec::new();
        for address in audience {
            audiences.push(target_of(address).ok_or(format!("audience: {address:?} is no HOST:PORT"))?);
        }
        let wildcard_port = match bound {
            Bound::Unix(target) => {
                audiences.push(target.clone());
                None
            }
            Bound::Tcp(bound) => {
                audiences.extend(target_of(&bound.to_string()));
                let named = listen.rsplit_once(':').map(|(host, _)| format!("{host}:{}", bound.port()));
                let is_wildcard = bound.ip().is_unspecified();
                audiences.extend(named.and_then(|address| target_of(&address)).filter(|_| !is_wildcard));
                is_wildcard.then_some(bound.port())
            }
        };
        let is_unix = matches!(bound, Bound::Unix(_));
        let read = Mutex::new((written_at(&path), Arc::new(secrets)));
        Ok(Self { tokens: Some(Arc::new(Known { path, audiences, wildcard_port, is_unix, read })), asks_certificates })
    }

    /// Who the caller is; an operator, where nobody proves anything.
    pub fn check(&self, headers: &HeaderMap, extensions: &Extensions) -> Result<Caller, Status> {
        let peer = peer_of(extensions);
        let host = host_of(peer);
        if self.tokens.is_none() && !self.asks_certificates {
            return Ok(Caller { name: host.as_str().into(), host, role: String::new(), peer });
        }
        let header = headers.get("authorization").and_then(|value| value.to_str().ok());
        let (role, name) = match (header, &self.tokens) {
            (None, _) if self.asks_certificates => in_certificate(extensions)?,
            (_, None) => return Err(unproven("this server takes no tokens: send a client certificate alone")),
            (header, Some(known)) => known.check(header.unwrap_or(""), peer)?,
        };
        Ok(Caller { name: name.into(), host, role, peer })
    }
}

impl Known {
    /// The role, and the name that the share of its callers is counted by.
    fn check(&self, header: &str, peer: Option<SocketAddr>) -> Result<(String, String), Status> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let Some(token) = self.secrets().proven(header) else {
            let text = "the token is made with no key of this server: compare token_file with tokens_file there";
            return Err(unproven(text));
        };
        if !self.is_meant(&token.target, peer) {
            let ours = self.audiences.join(", ");
            let text =
                format!("the token is for {}, and this server is {ours}: dial it so, or --audience", token.target);
            let metadata = [("target", token.target), ("audiences", ours)];
            return Err(refused(Code::Unauthenticated, ErrorReason::WrongAudience, text, metadata));
        }
        let age = now.abs_diff(token.made_at);
        if age > CLOCK_SKEW_SECONDS {
            let text = format!("the token is of another time, by {age} s, and holds for {CLOCK_SKEW_SECONDS} s");
            let metadata = [("ageSeconds", age.to_string()), ("limitSeconds", CLOCK_SKEW_SECONDS.to_string())];
            return Err(refused(Code::Unauthenticated, ErrorReason::CredentialsExpired, text, metadata));
        }
        let (role, scope) = token.role.split_once(' ').unwrap_or((&token.role, ""));
        let name = scope.split(' ').next().filter(|name| !name.is_empty() && !name.starts_with("role="));
        let name = name.map_or_else(|| host_of(peer), |name| format!("{role} {name}"));
        Ok((role.to_owned(), name))
    }

    /// Read again where the file changed; one that cannot be read leaves what was known.
    fn secrets(&self) -> Arc<Secrets> {
        let mut read = self.read.lock();
        let written = written_at(&self.path);
        if read.0 != written {
            if let Ok(secrets) = read_tokens(&self.path) {
                *read = (written, Arc::new(secrets));
            }
        }
        read.1.clone()
    }

    /// A loopback address is one of many hosts: it counts for callers of this host alone.
    fn is_meant(&self, target: &str, peer: Option<SocketAddr>) -> bool {
        let is_known = || self.audiences.iter().any(|known| known == target);
        let is_here = self.is_unix || peer.is_some_and(|peer| peer.ip().to_canonical().is_loopback());
        let Ok(address) = target.parse::<SocketAddr>() else {
            let is_local = target.starts_with("localhost:") || target.starts_with("unix");
            return is_known() && (is_here || !is_local);
        };
        if address.ip().is_loopback() && !is_here {
            return false;
        }
        // Every network has the same link-local numbers.
        let is_shared = match address.ip() {
            IpAddr::V4(ip) => ip.is_unspecified() || ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unspecified() || ip.is_unicast_link_local(),
        };
        let is_ours = || !is_shared && std::net::UdpSocket::bind((address.ip(), 0)).is_ok();
        is_known() || (self.wildcard_port == Some(address.port()) && is_ours())
    }
}

fn in_certificate(extensions: &Extensions) -> Result<(String, String), Status> {
    let certificates = extensions.get::<TlsConnectInfo<TcpConnectInfo>>().and_then(TlsConnectInfo::peer_certs);
    let first = certificates.as_ref().and_then(|chain| chain.first());
    let names = match first.map(|certificate| names_in(certificate)) {
        None => Vec::new(),
        Some(names) => names.ok_or_else(|| unproven("the names of the client certificate cannot be read"))?,
    };
    who_is_named(&names).ok_or_else(|| {
        let kinds = "no email, DNS or URI name";
        unproven(&format!(
            "no bearer token, and {kinds} of the client certificate ends in .rank, .consumer or .operator"
        ))
    })
}

/// By the first name that ends in a role, after a dot or a slash or as a whole.
fn who_is_named(names: &[String]) -> Option<(String, String)> {
    let role_of = |name: &str| ROLES.into_iter().find(|role| name.rsplit(['.', '/']).next() == Some(role));
    let (role, name) = names.iter().find_map(|name| role_of(name).map(|role| (role, name)))?;
    Some((role.to_owned(), format!("certificate {name}")))
}

fn unproven(text: &str) -> Status {
    let metadata = [("scheme", "bearer".to_owned())];
    refused(Code::Unauthenticated, ErrorReason::CredentialsInvalid, text.to_owned(), metadata)
}

/// None: a Unix socket.
fn peer_of(extensions: &Extensions) -> Option<SocketAddr> {
    let plain = extensions.get::<TcpConnectInfo>();
    let info = plain.or_else(|| extensions.get::<TlsConnectInfo<TcpConnectInfo>>().map(TlsConnectInfo::get_ref));
    info.and_then(TcpConnectInfo::remote_addr)
}

fn host_of(peer: Option<SocketAddr>) -> String {
    peer.map_or_else(|| "unix".to_owned(), |peer| peer.ip().to_canonical().to_string())
}

fn written_at(path: &str) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|found| found.modified()).ok()
}

/// Lines ROLE [NAME]:SECRET; blank lines and # comments are skipped. An error names the line and never shows it, also
/// where a secret has two lines: whoever has it would be what the last one says.
fn read_tokens(path: &str) -> Result<Secrets, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("tokens-file: {path}: {error}"))?;
    let mut secrets: HashMap<String, (usize, String)> = HashMap::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |rule: &str| format!("tokens-file: line {}: must be {rule}", at + 1);
        let (who, secret) = line.split_once(':').ok_or_else(|| wrong("ROLE [NAME]:SECRET"))?;
        let words: Vec<_> = who.split_whitespace().collect();
        if !is_holder(&words) {
            return Err(wrong(
                "ROLE [NAME]:SECRET with rank, consumer or operator, or rank ENGINES [role=prefill|decode]:SECRET",
            ));
        }
        let secret = secret.trim();
        if secret.chars().count() < kvgrpc::SHORTEST_SECRET {
            return Err(wrong("a secret of at least 16 characters: openssl rand -hex 32"));
        }
        let holder = words.join(" ");
        let (first, before) = secrets.entry(secret.to_owned()).or_insert_with(|| (at, holder.clone()));
        if *before != holder {
            let rule = "secrets that have one role, name and scope each";
            return Err(format!("tokens-file: must be {rule}, not the same on lines {} and {}", *first + 1, at + 1));
        }
    }
    Ok(Secrets::new(secrets.into_iter().map(|(secret, (_, holder))| (secret, holder)).collect()))
}

/// ROLE [NAME], or rank [ENGINES] [role=prefill|decode].
fn is_holder(words: &[&str]) -> bool {
    let Some((role, mut scope)) = words.split_first() else { return false };
    if let (&"rank", Some((&("role=prefill" | "role=decode"), before))) = (role, scope.split_last()) {
        scope = before;
    }
    let is_of_a_name = |letter: char| letter.is_ascii_alphanumeric() || "._*?-".contains(letter);
    let is_name = |name: &&str| name.len() <= 128 && name.chars().all(is_of_a_name);
    ROLES.contains(role) && scope.len() <= 1 && scope.iter().all(is_name)
}

#[cfg(test)]
#[path = "tests/certificates.rs"]
mod tests;
