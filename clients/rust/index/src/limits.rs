//! How many calls run at once, of all callers and of one, by the names of `CallLimits`; past it TOO_MANY_REQUESTS.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use kvgrpc::pb::{self, ErrorReason};
use parking_lot::Mutex;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::proof::Caller;
use crate::refusals::DOMAIN;

/// Most are taken for less, and asking costs both sides a call.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// A host or a connection may have so many in any case: who has a share of nine should not get one.
const AT_LEAST: usize = 16;
const HEALTH_WATCH: &str = "/grpc.health.v1.Health/Watch";
const REFLECTION: &str = "/grpc.reflection.";

/// Those of a server that was told none. Some are of calls that an index does not serve.
pub const USUAL: pb::CallLimits = pb::CallLimits {
    unary: 4096,
    streams: 16_384,
    watches_per_caller: 64,
    health_watches_per_caller: 16,
    reflections_per_caller: 16,
    locates_per_caller: 1024,
    keepalives_per_caller: 1024,
};

/// Reads '{"unary": 100}'; what it does not name is as usual.
pub fn parse(text: &str) -> Result<pb::CallLimits, String> {
    let mut limits = USUAL;
    if text.is_empty() {
        return Ok(limits);
    }
    let named: HashMap<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|error| format!("call-limits: no JSON object: {error}"))?;
    for (name, value) in named {
        let limit = match name.as_str() {
            "unary" => &mut limits.unary,
            "streams" => &mut limits.streams,
            "watches_per_caller" => &mut limits.watches_per_caller,
            "health_watches_per_caller" => &mut limits.health_watches_per_caller,
            "reflections_per_caller" => &mut limits.reflections_per_caller,
            "locates_per_caller" => &mut limits.locates_per_caller,
            "keepalives_per_caller" => &mut limits.keepalives_per_caller,
            _ => return Err(format!("call-limits: there is no {name:?}")),
        };
        let number = value.as_u64().filter(|number| *number > 0);
        let number = number.ok_or_else(|| format!("call-limits: {name}: must be at least 1, not {value}"))?;
        *limit = u32::try_from(number).unwrap_or(u32::MAX);
    }
    Ok(limits)
}

/// Places for calls of one kind.
struct Shares {
    most: usize,
    scope: &'static str,
    setting: &'static str,
    /// All are of one caller, whose hosts and connections share them; else of all callers.
    of_one: bool,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    of_accounts: HashMap<String, usize>,
    count: usize,
}

/// A place of a call, until it is dropped.
pub struct Share {
    shares: Arc<Shares>,
    accounts: Vec<String>,
}

/// Name, host and role of a caller.
pub type Who = (Arc<str>, String, String);
/// How many calls of each method are open, by its path.
pub type ByMethod = BTreeMap<String, u32>;
type OpenCalls = Arc<Mutex<BTreeMap<Who, ByMethod>>>;

/// A call that was let in, until it is dropped.
pub struct OpenCall {
    _shares: Vec<Share>,
    calls: OpenCalls,
    who: Who,
    path: String,
}

/// The bounds of one server.
#[derive(Clone)]
pub struct Limits {
    open: OpenCalls,
    unary: Arc<Shares>,
    streams: Arc<Shares>,
    health_watches: Arc<Shares>,
    reflections: Arc<Shares>,
}

impl Limits {
    pub fn new(limits: &pb::CallLimits) -> Self {
        let shares = |most: u32, scope, setting, of_one| {
            Arc::new(Shares { most: most as usize, scope, setting, of_one, taken: Mutex::default() })
        };
        let (watches, reflections) = ("Watch of one caller", "reflection streams of one caller");
        Self {
            open: OpenCalls::default(),
            unary: shares(limits.unary, "calls", "unary", false),
            streams: shares(limits.streams, "streams", "streams", false),
            health_watches: shares(limits.health_watches_per_caller, watches, "health_watches_per_caller", true),
            reflections: shares(limits.reflections_per_caller, reflections, "reflections_per_caller", true),
        }
    }

    /// Who has calls open, and which; ordered by name, host and role.
    pub fn open_calls(&self) -> Vec<(Who, ByMethod)> {
        self.open.lock().iter().map(|(who, open)| (who.clone(), open.clone())).collect()
    }

    /// Lets a call in, or says why not.
    pub fn take(&self, path: &str, caller: &Caller) -> Result<OpenCall, Status> {
        let shares: &[&Arc<Shares>] = match path {
            HEALTH_WATCH => &[&self.streams, &self.health_watches],
            _ if path.starts_with(REFLECTION) => &[&self.streams, &self.reflections],
            _ => &[&self.unary],
        };
        let shares = shares.iter().map(|shares| shares.take(caller)).collect::<Result<_, _>>()?;
        let who = (caller.name.clone(), caller.host.clone(), caller.role.clone());
        *self.open.lock().entry(who.clone()).or_default().entry(path.to_owned()).or_insert(0) += 1;
        Ok(OpenCall { _shares: shares, calls: self.open.clone(), who, path: path.to_owned() })
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        let mut calls = self.calls.lock();
        let Some(by_method) = calls.get_mut(&self.who) else { return };
        if let Some(open) = by_method.get_mut(&self.path) {
            *open -= 1;
            if *open == 0 {
                by_method.remove(&self.path);
            }
        }
        if by_method.is_empty() {
            calls.remove(&self.who);
        }
    }
}

/// Whether a call goes on for as long as its caller likes.
pub fn is_stream(path: &str) -> bool {
    path == HEALTH_WATCH || path.starts_with(REFLECTION)
}

impl Shares {
    fn take(self: &Arc<Self>, caller: &Caller) -> Result<Share, Status> {
        let accounts = accounts_of(caller);
        let mut taken = self.taken.lock();
        self.check(&taken, &accounts)?;
        taken.count += 1;
        for account in &accounts {
            *taken.of_accounts.entry(account.clone()).or_insert(0) += 1;
        }
        Ok(Share { shares: self.clone(), accounts })
    }

    /// One caller has as many as it leaves to others; so has each host of it, and each connection of a host.
    fn check(&self, taken: &Taken, accounts: &[String]) -> Result<(), Status> {
        let own = |account: &String| taken.of_accounts.get(account).copied().unwrap_or(0);
        let count = if self.of_one { accounts.first().map_or(0, own) } else { taken.count };
        let mut share = self.most.saturating_sub(count);
        if share == 0 {
            let (scope, setting, most) = (self.scope, self.setting, self.most);
            let text = format!(
                "{count} {scope} are there already, {most} are the most; its call_limits.{setting} \
                 (KVGRPC_CALL_LIMITS) is the bound"
            );
            return Err(too_many(text, most, count + 1, scope.to_owned()));
        }
        for (depth, account) in accounts.iter().enumerate().skip(usize::from(self.of_one)) {
            let own = own(account);
            if own >= share.max(if depth > 0 { AT_LEAST } else { 0 }) {
                let scope = self.scope;
                let text = format!(
                    "{own} {scope} are there already of one caller ({account}), which may have as many as it leaves to \
                     others: {share} are free"
                );
                return Err(too_many(text, share, own + 1, format!("{scope} of one caller")));
            }
            // What it could still take: each of these would be one less to take.
            share = share.saturating_sub(own) / 2;
        }
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.shares.taken.lock();
        taken.count -= 1;
        for account in &self.accounts {
            if let Some(own) = taken.of_accounts.get_mut(account) {
                *own -= 1;
                if *own == 0 {
                    taken.of_accounts.remove(account);
                }
            }
        }
    }
}

/// The caller, its host where that is not its name, and its connection.
fn accounts_of(Caller { name, host, peer, .. }: &Caller) -> Vec<String> {
    let mut accounts = vec![name.to_string()];
    if **name != **host {
        accounts.push(format!("{name} {host}"));
    }
    accounts.extend(peer.map(|peer| format!("{name} {host} {}", peer.port())));
    accounts
}

fn too_many(text: String, limit: usize, value: usize, scope: String) -> Status {
    let metadata = [("limit", limit.to_string()), ("value", value.to_string()), ("scope", scope)];
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value));
    let mut details = ErrorDetails::with_error_info(ErrorReason::TooManyRequests.as_str_name(), DOMAIN, metadata);
    details.set_retry_info(Some(RETRY_AFTER));
    Status::with_error_details(Code::ResourceExhausted, text, details)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    fn caller(name: &str, peer: &str) -> Caller {
        let peer: SocketAddr = peer.parse().unwrap();
        Caller { name: name.into(), host: peer.ip().to_string(), role: "consumer".into(), peer: Some(peer) }
    }

    fn unary(most: u32) -> Limits {
        Limits::new(&pb::CallLimits { unary: most, ..USUAL })
    }

    /// As many as there may be of one call of each of a hundred connections.
    fn takes(limits: &Limits, path: &str, name: &str, host: &str) -> Vec<OpenCall> {
        let of = |port: u16| limits.take(path, &caller(name, &format!("{host}:{port}"))).ok();
        (1..=100).map_while(of).collect()
    }

    #[test]
    fn one_caller_has_half_and_the_next_one_half_of_what_is_left() {
        let (limits, path) = (unary(64), "/kvgrpc.v1.IndexService/Score");
        let first = takes(&limits, path, "10.0.0.1", "10.0.0.1");
        assert_eq!(first.len(), 32);
        let refused = limits.take(path, &caller("10.0.0.1", "10.0.0.1:1")).err().unwrap();
        let details = refused.get_error_details();
        assert_eq!(details.retry_info().unwrap().retry_delay, Some(RETRY_AFTER));
        assert_eq!(details.error_info().unwrap().metadata["scope"], "calls of one caller");
        let second = takes(&limits, path, "10.0.0.2", "10.0.0.2");
        assert_eq!(second.len(), 16);
        let who = |address: &str| (address.into(), address.to_owned(), "consumer".to_owned());
        let open = |calls| ByMethod::from([(path.to_owned(), calls)]);
        assert_eq!(limits.open_calls(), [(who("10.0.0.1"), open(32)), (who("10.0.0.2"), open(16))]);
        drop((first, second));
        assert!(limits.open_calls().is_empty());
        assert_eq!(takes(&limits, path, "10.0.0.2", "10.0.0.2").len(), 32);
    }

    #[test]
    fn a_connection_leaves_places_to_the_others_of_its_token() {
        let (limits, path) = (unary(512), "/kvgrpc.v1.IndexService/Score");
        let of = |port: u16| move || caller("consumer a", &format!("10.0.0.1:{port}"));
        let all_of = |who: &dyn Fn() -> Caller| -> Vec<OpenCall> {
            std::iter::from_fn(|| limits.take(path, &who()).ok()).collect()
        };
        let (one, other) = (all_of(&of(1)), all_of(&of(2)));
        assert!(one.len() < 128 && other.len() >= AT_LEAST, "{} {}", one.len(), other.len());
    }

    #[test]
    fn watches_of_one_caller_are_bounded_and_nobody_elses() {
        let limits = Limits::new(&parse(r#"{"health_watches_per_caller": 4}"#).unwrap());
        let held = takes(&limits, HEALTH_WATCH, "a", "10.0.0.1");
        assert_eq!(held.len(), 4);
        assert!(limits.take(HEALTH_WATCH, &caller("b", "10.0.0.1:2")).is_ok());
    }

    #[test]
    fn what_is_no_limit_is_refused_by_its_name() {
        for (wrong, why) in [
            ("7", "no JSON object"),
            (r#"{"unarry": 1}"#, "there is no \"unarry\""),
            (r#"{"unary": 0}"#, "unary: must be at least 1, not 0"),
            (r#"{"unary": "9"}"#, "unary: must be at least 1, not \"9\""),
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
