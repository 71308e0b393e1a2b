//! A server that names the same page again has a list without an end: it is told so, and not read for ever.

use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Duration;

use kvgrpc::pb::registry_service_server::{RegistryService, RegistryServiceServer};
use kvgrpc::pb::{self, ErrorReason, Role};
use kvgrpc::{Dialer, Options, Refusal, Registry};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::Stream;
use tonic::{Code, Request, Response, Status, Streaming};

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Has two pages, of which each names the other.
#[derive(Clone, Default)]
struct Endless(Arc<AtomicU32>);

impl Endless {
    fn next_page(&self) -> String {
        format!("page{}", self.0.fetch_add(1, Ordering::Relaxed) % 2)
    }
}

#[tonic::async_trait]
impl RegistryService for Endless {
    type KeepAliveStream = Answers<pb::KeepAliveResponse>;
    type WatchEnginesStream = Answers<pb::WatchEnginesResponse>;

    async fn register(&self, _: Request<pb::RegisterRequest>) -> Result<Response<pb::RegisterResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }

    async fn keep_alive(
        &self,
        _: Request<Streaming<pb::KeepAliveRequest>>,
    ) -> Result<Response<Self::KeepAliveStream>, Status> {
        Err(Status::unimplemented("not asked"))
    }

    async fn deregister(&self, _: Request<pb::DeregisterRequest>) -> Result<Response<pb::DeregisterResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }

    async fn get_engine(&self, _: Request<pb::GetEngineRequest>) -> Result<Response<pb::GetEngineResponse>, Status> {
        let next_page_token = self.next_page();
        Ok(Response::new(pb::GetEngineResponse { next_page_token, ..Default::default() }))
    }

    async fn list_engines(
        &self,
        _: Request<pb::ListEnginesRequest>,
    ) -> Result<Response<pb::ListEnginesResponse>, Status> {
        let next_page_token = self.next_page();
        Ok(Response::new(pb::ListEnginesResponse { next_page_token, ..Default::default() }))
    }

    async fn resolve_ranks(
        &self,
        _: Request<pb::ResolveRanksRequest>,
    ) -> Result<Response<pb::ResolveRanksResponse>, Status> {
        Err(Status::unimplemented("not asked"))
    }

    async fn watch_engines(
        &self,
        _: Request<pb::WatchEnginesRequest>,
    ) -> Result<Response<Self::WatchEnginesStream>, Status> {
        Err(Status::unimplemented("not asked"))
    }
}

fn check<T>(answer: Result<T, Refusal>) {
    let Err(refusal) = answer else { panic!("an endless list was read") };
    assert_eq!((refusal.code, refusal.reason), (Code::Internal, ErrorReason::Internal));
    assert!(refusal.message.contains("its list has no end") && !refusal.may_repeat());
}

#[tokio::test]
async fn a_list_without_an_end_is_not_read_for_ever() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = tonic::transport::Server::builder().add_service(RegistryServiceServer::new(Endless::default()));
    let serving = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let registry = Registry::new(Dialer::new(&address, Options::default()).unwrap(), Vec::new());
    let all = async {
        check(registry.get_engine("e").await);
        check(registry.list_engines(Role::Unspecified, true).await);
    };
    tokio::time::timeout(Duration::from_secs(60), all).await.unwrap();
    serving.abort();
}
