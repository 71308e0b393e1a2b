//! Who gets in, and how many at once: before a byte of a request is read.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http_body::{Frame, SizeHint};
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{Bytes, Service};
use tonic::Status;
use tower_layer::Layer;

use crate::limits::{is_stream, Limits, OpenCall};
use crate::proof::Proof;
use crate::turns::Turns;

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
    limits: Limits,
    reading: Arc<Turns>,
    health_needs_token: bool,
}

impl Admission {
    pub fn new(proof: Proof, limits: Limits, health_needs_token: bool) -> Self {
        Self { proof, limits, reading: Turns::shared(CALLS_AT_ONCE), health_needs_token }
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
        let Admission { proof, limits, reading, health_needs_token } = self.admission.clone();
        Box::pin(async move {
            let path = request.uri().path();
            if path == HEALTH_CHECK && !health_needs_token {
                return inner.call(request).await;
            }
            let caller = match proof.check(request.headers(), request.extensions()) {
                Ok(caller) => caller,
                Err(refused) => return Ok(refused.into_http()),
            };
            if path == HEALTH_CHECK || path.starts_with(SERVER) {
                request.extensions_mut().insert(caller);
                return inner.call(request).await;
            }
            let open = match limits.take(path, &caller) {
                Ok(open) => open,
                Err(refused) => return Ok(refused.into_http()),
            };
            let _place = if is_stream(path) { None } else { Some(reading.take(&caller.name).await) };
            request.extensions_mut().insert(caller);
            let response = inner.call(request).await?;
            Ok(response.map(|body| Body::new(Answer { body, _open: open })))
        })
    }
}

/// An answer, whose call is one of its caller's until it was taken.
struct Answer {
    body: Body,
    _open: OpenCall,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
