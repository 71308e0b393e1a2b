//! A publisher whose connections carry nothing any more is left, for whoever answers at its address: within 5 s and a little. A
//! follower that does not run for a while leaves nobody.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use kvgrpc::pb::event_service_server::{EventService, EventServiceServer};
use kvgrpc::pb::{self, watch_response::Kind, WatchResponse};
use kvgrpc::{Dialer, EventFollower, IndexOptions, Item, Options, PrefixIndex, Stream};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status};

/// As many as share a connection.
const STREAMS: usize = 64;

/// Empty caches.
struct Publisher;

#[tonic::async_trait]
impl EventService for Publisher {
    type WatchStream = Pin<Box<dyn tokio_stream::Stream<Item = Result<WatchResponse, Status>> + Send>>;

    async fn list_streams(
        &self,
        _: Request<pb::ListStreamsRequest>,
    ) -> Result<Response<pb::ListStreamsResponse>, Status> {
        let stream = |number| pb::EventStream { engine: format!("engine{number}"), ..Default::default() };
        let streams = (0..STREAMS).map(stream).collect();
        Ok(Response::new(pb::ListStreamsResponse { streams, ..Default::default() }))
    }

    async fn watch(&self, _: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (say, said) = tokio::sync::mpsc::channel(4);
        tokio::spawn(async move {
            let stream = Some(pb::EventStream { log_id: "a".into(), ..Default::default() });
            let begin = Kind::Begin(pb::WatchBegin { stream, first_sequence: 0 });
            let last =
                Kind::Snapshot(pb::SnapshotPart { last: true, state: Some(Default::default()), ..Default::default() });
            for kind in [begin, last] {
                let _ = say.send(Ok(WatchResponse { kind: Some(kind) })).await;
            }
            let beat = || {
                Kind::Heartbeat(pb::WatchHeartbeat { next_sequence: 0, state: Some(Default::default()), load: None })
            };
            while say.send(Ok(WatchResponse { kind: Some(beat()) })).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(said))))
    }
}

/// Carries connections to an address. Those of before `freeze` stay open, and carry nothing after it.
struct Proxy {
    address: String,
    current: Arc<std::sync::Mutex<Arc<AtomicBool>>>,
}

impl Proxy {
    async fn to(address: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let own = listener.local_addr().unwrap().to_string();
        let current = Arc::new(std::sync::Mutex::new(Arc::new(AtomicBool::new(false))));
        let shared = current.clone();
        tokio::spawn(async move {
            while let Ok((mut from, _)) = listener.accept().await {
                let (frozen, address) = (shared.lock().unwrap().clone(), address.clone());
                tokio::spawn(async move {
                    let mut to = TcpStream::connect(address).await.unwrap();
                    tokio::select! {
                        _ = copy_bidirectional(&mut from, &mut to) => return,
                        () = until(&frozen) => {}
                    }
                    tokio::time::sleep(Duration::from_secs(60)).await;
                });
            }
        });
        Self { address: own, current }
    }

    fn freeze(&self) {
        let before = std::mem::replace(&mut *self.current.lock().unwrap(), Arc::new(AtomicBool::new(false)));
        before.store(true, Ordering::SeqCst);
    }
}

async fn until(frozen: &AtomicBool) {
    while !frozen.load(Ordering::SeqCst) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn until_current(follower: &mut EventFollower) {
    while !matches!(follower.next().await, Item::Current { .. }) {}
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_publisher_is_left_for_who_answers_at_its_address() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::to(listener.local_addr().unwrap().to_string()).await;
    let server = tonic::transport::Server::builder().add_service(EventServiceServer::new(Publisher));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let dialer = Dialer::new(&proxy.address, Options::default()).unwrap();
    let mut follower = EventFollower::new(dialer, Stream::default());
    tokio::time::timeout(Duration::from_secs(5), until_current(&mut follower)).await.unwrap();
    proxy.freeze();
    // What was said before may still come.
    while tokio::time::timeout(Duration::from_secs(1), follower.next()).await.is_ok() {}
    tokio::time::timeout(Duration::from_secs(6), until_current(&mut follower)).await.expect("it is left within 5 s");
}

/// Publishers in a thread of their own, and where they are.
fn publishers() -> String {
    let (say, said) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        tokio::runtime::Runtime::new().unwrap().block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            say.send(listener.local_addr().unwrap().to_string()).unwrap();
            let server = tonic::transport::Server::builder().add_service(EventServiceServer::new(Publisher));
            server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
    });
    said.recv().unwrap()
}

#[tokio::test]
async fn what_came_while_an_index_did_not_run_ends_no_connection() {
    let index = PrefixIndex::new(IndexOptions {
        registries: Vec::new(),
        sources: vec![publishers()],
        dial: Arc::new(|address| Dialer::new(address, Options::default())),
        saved: None,
    });
    let index = index.unwrap();
    tokio::time::timeout(Duration::from_secs(10), index.until_current(STREAMS)).await.unwrap();
    // Its only thread: ten heartbeats of each lie in the socket then.
    std::thread::sleep(Duration::from_secs(1));
    tokio::time::sleep(Duration::from_millis(500)).await;
    for source in index.sources() {
        assert_eq!((source.last_error.as_str(), source.snapshots), ("", 1), "{}", source.engine);
    }
}
