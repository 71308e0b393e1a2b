//! Who gets in, and how many at once: before a byte of a request is read.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::Service;
use tower_layer::Layer;

use crate::proof::{Caller, Proof};

/// Requests that are read or worked on: each may have 4 MiB.
const CALLS_AT_ONCE: usize = 64;
/// For whoever asks, as a kubelet.
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";
/// An index that is full can still be looked at, and drained.
const SERVER: &str = "/kvgrpc.v1.ServerService/";

/// Asks every call for its proof, and lets so many in that one caller leaves as many places to others as it takes.
#[derive(Clone)]
pub struct Admission {
    proof: Proof,
    places: Arc<Places>,
}

impl Admission {
    pub fn new(proof: Proof, places: Arc<Places>) -> Self {
        Self { proof, places }
    }
}

impl<S> Layer<S> for Admission {
    type Service = Admitted<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Admitted { inner, admission: self.clone() }
    }
}

/// The services behind it.
#[derive(Clone)]
pub struct Admitted<S> {
    inner: S,
    admission: Admission,
}

impl<S> Service<Request<Body>> for Admitted<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        // The one that said it is ready.
        let fresh = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, fresh);
        let Admission { proof, places } = self.admission.clone();
        Box::pin(async move {
            let path = request.uri().path();
            if path == HEALTH_CHECK {
                return inner.call(request).await;
            }
            let is_counted = !path.starts_with(SERVER);
            let caller = match proof.check(request.headers(), request.extensions()) {
                Ok(caller) => caller,
                Err(refused) => return Ok(refused.into_http()),
            };
            let _place = if is_counted { Some(places.take(&caller).await) } else { None };
            request.extensions_mut().insert(caller);
            inner.call(request).await
        })
    }
}

/// The calls that run, by who makes them.
#[derive(Default)]
pub struct Places {
    taken: Mutex<Taken>,
    freed: Notify,
}

/// Shares go by the name alone.
#[derive(Default)]
struct Taken {
    by_name: HashMap<String, usize>,
    by_caller: BTreeMap<Caller, u32>,
}

impl Places {
    /// Who has calls open, and how many; ordered by name, host and role.
    pub fn open_calls(&self) -> Vec<(Caller, u32)> {
        self.taken.lock().by_caller.iter().map(|(caller, open)| (caller.clone(), *open)).collect()
    }

    /// Waits while the caller has its share, or others have all.
    async fn take(self: Arc<Self>, caller: &Caller) -> Place {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if self.is_taken(caller) {
                return Place { places: self.clone(), caller: caller.clone() };
            }
            freed.await;
        }
    }

    fn is_taken(&self, caller: &Caller) -> bool {
        let mut taken = self.taken.lock();
        let free = CALLS_AT_ONCE - taken.by_name.values().sum::<usize>();
        let own = taken.by_name.get(&caller.name).copied().unwrap_or(0);
        if own + 1 > free {
            return false;
        }
        taken.by_name.insert(caller.name.clone(), own + 1);
        *taken.by_caller.entry(caller.clone()).or_default() += 1;
        true
    }
}

struct Place {
    places: Arc<Places>,
    caller: Caller,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock();
        if let Some(own) = taken.by_name.get_mut(&self.caller.name) {
            *own -= 1;
            if *own == 0 {
                taken.by_name.remove(&self.caller.name);
            }
        }
        if let Some(open) = taken.by_caller.get_mut(&self.caller) {
            *open -= 1;
            if *open == 0 {
                taken.by_caller.remove(&self.caller);
            }
        }
        drop(taken);
        self.places.freed.notify_waiters();
    }
}
