//! The bearer token: made for one target and one second from a secret that never travels (docs/tokens.md).

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use base64::Engine;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use tonic::metadata::AsciiMetadataValue;
use tonic::service::Interceptor;
use tonic::{Request, Status};

const VERSION: &str = "kvgrpc1";

/// How many characters a secret has at least: whoever gets a token can try secrets against it.
pub const SHORTEST_SECRET: usize = 16;

/// The value of the `authorization` header for calls to `target`, as [`target_of`] spells it, at a Unix second.
pub fn authorization(secret: &str, target: &str, now: u64) -> String {
    let key = mac(secret.as_bytes(), &format!("{VERSION} audience {target}"));
    let encoded = URL_SAFE_NO_PAD.encode(target);
    let signed = format!("{VERSION}.{}.{now}.{encoded}", key_id(secret));
    let proof = URL_SAFE_NO_PAD.encode(mac(&key, &signed));
    format!("Bearer {signed}.{proof}")
}

/// What a token names that is sent to `address`: "host:port", "unix:/path" or "unix-abstract:name" in its one spelling.
/// None: it is no address.
pub fn target_of(address: &str) -> Option<String> {
    if let Some(path) = address.strip_prefix("unix:") {
        return Some(format!("unix:{}", path.strip_prefix("//").unwrap_or(path)));
    }
    if address.starts_with("unix-abstract:") {
        return Some(address.to_owned());
    }
    let (host, port) = address.rsplit_once(':')?;
    let port: u16 = port.parse().ok()?;
    let host = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    if host.is_empty() {
        return None;
    }
    match host.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
        Ok(IpAddr::V4(ip)) => Some(format!("{ip}:{port}")),
        Ok(IpAddr::V6(ip)) => Some(format!("[{ip}]:{port}")),
        Err(_) => {
            let name = host.to_ascii_lowercase();
            Some(format!("{}:{port}", name.strip_suffix('.').unwrap_or(&name)))
        }
    }
}

/// Puts a token of the moment on every call; none where there is no secret.
#[derive(Clone)]
pub struct Authorize {
    secret_and_target: Option<(String, String)>,
}

impl Authorize {
    pub(crate) fn new(secret: Option<String>, target: String) -> Self {
        Self { secret_and_target: secret.map(|secret| (secret, target)) }
    }
}

impl Interceptor for Authorize {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some((secret, target)) = &self.secret_and_target {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
            let header = authorization(secret, target, now);
            let value = AsciiMetadataValue::try_from(header)
                .map_err(|_| Status::invalid_argument("the address is no text of a header"))?;
            request.metadata_mut().insert("authorization", value);
        }
        Ok(request)
    }
}

fn mac(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of every length");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Secrets of callers, each with the role of who has it: what a server checks tokens with.
pub struct Secrets(HashMap<String, (String, String)>);

/// A token whose secret is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proven {
    /// What its holder is.
    pub role: String,
    /// The server that it was made for, as [`target_of`] spells it: the caller must compare.
    pub target: String,
    /// Unix seconds: the caller must compare.
    pub made_at: u64,
}

impl Secrets {
    /// Roles by secrets.
    pub fn new(roles: HashMap<String, String>) -> Self {
        Self(roles.into_iter().map(|(secret, role)| (key_id(&secret), (secret, role))).collect())
    }

    /// Whether it lets nobody in.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whose token the `authorization` header has. None, for an unknown secret and a wrong proof alike.
    pub fn proven(&self, header: &str) -> Option<Proven> {
        let (scheme, text) = header.split_once(' ')?;
        let [version, id, made_at, target, proof] = text.trim().split('.').collect::<Vec<_>>().try_into().ok()?;
        let is_time = made_at.len() <= 12 && made_at.bytes().all(|digit| digit.is_ascii_digit());
        if !scheme.eq_ignore_ascii_case("bearer") || version != VERSION || !is_time {
            return None;
        }
        let target = String::from_utf8(URL_SAFE_NO_PAD.decode(target).ok()?).ok()?;
        let (secret, role) = self.0.get(id)?;
        let key = mac(secret.as_bytes(), &format!("{VERSION} audience {target}"));
        let mut signed = Hmac::<Sha256>::new_from_slice(&key).expect("HMAC takes keys of every length");
        signed.update(text.trim().rsplit_once('.')?.0.as_bytes());
        signed.verify_slice(&URL_SAFE_NO_PAD.decode(proof).ok()?).ok()?;
        Some(Proven { role: role.clone(), target, made_at: made_at.parse().ok()? })
    }
}

fn key_id(secret: &str) -> String {
    hex(&mac(secret.as_bytes(), &format!("{VERSION} key id")))[..16].to_owned()
}
