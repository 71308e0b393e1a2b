//! A made-up fleet for benchmarks and tests: `fleet CACHES BLOCKS BATCHES_PER_SECOND (chains|half) [DP_RANKS]`. One process serves
//! the streams of all engines, each with so many dp ranks (1): snapshots of so many blocks each, batches that were made beforehand,
//! and a load.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kvgrpc::pb::event_service_server::{EventService, EventServiceServer};
use kvgrpc::pb::{self, watch_response::Kind, WatchMode, WatchResponse};
use tokio::net::TcpListener;
use tokio::sync::mpsc::Sender;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

#[path = "support/layout.rs"]
mod layout;

use layout::{engine_name, Layout, BLOCKS_OF_A_BATCH, MADE};

const BLOCKS_OF_A_PART: usize = 8192;

struct Fleet {
    layout: Layout,
    dp_ranks: u64,
    every: Option<Duration>,
    batches: Vec<Vec<Vec<u8>>>,
}

type Told = Result<WatchResponse, Status>;

#[tonic::async_trait]
impl EventService for Serving {
    type WatchStream = Pin<Box<dyn tokio_stream::Stream<Item = Told> + Send>>;

    async fn list_streams(
        &self,
        _: Request<pb::ListStreamsRequest>,
    ) -> Result<Response<pb::ListStreamsResponse>, Status> {
        let streams = (0..self.0.layout.engines).map(|cache| self.0.stream_of(cache)).collect();
        Ok(Response::new(pb::ListStreamsResponse { streams, ..Default::default() }))
    }

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let request = request.into_inner();
        let number = request.engine.trim_start_matches("engine").parse::<u64>();
        let engine = number.map_err(|_| Status::not_found("no such engine"))?;
        let cache = engine * self.0.dp_ranks + u64::from(request.dp);
        let next = request.from_sequence.filter(|_| request.log_id == self.0.stream_of(cache).log_id);
        if request.mode() != WatchMode::Snapshot && next.is_none() {
            return Err(Status::unimplemented("snapshots, and what follows on one"));
        }
        let (say, said) = tokio::sync::mpsc::channel(4);
        tokio::spawn(tell(self.0.clone(), cache, next, say));
        Ok(Response::new(Box::pin(ReceiverStream::new(said))))
    }
}

struct Serving(Arc<Fleet>);

impl Fleet {
    fn stream_of(&self, cache: u64) -> pb::EventStream {
        let (engine, dp) = (engine_name(cache / self.dp_ranks), (cache % self.dp_ranks) as u32);
        pb::EventStream { engine, dp, log_id: format!("{cache:032x}"), ..Default::default() }
    }
}

/// Says all of one stream until nobody listens, to whoever knows what came before `next` without a snapshot.
async fn tell(fleet: Arc<Fleet>, cache: u64, next: Option<u64>, say: Sender<Told>) -> Option<()> {
    let said = |kind| Ok(WatchResponse { kind: Some(kind) });
    say.send(said(Kind::Begin(pb::WatchBegin { stream: Some(fleet.stream_of(cache)), first_sequence: 0 })))
        .await
        .ok()?;
    let blocks = if next.is_some() { Vec::new() } else { fleet.layout.blocks_of(cache) };
    let parts = blocks.chunks(BLOCKS_OF_A_PART).count();
    for (at, part) in blocks.chunks(BLOCKS_OF_A_PART).enumerate() {
        let payloads = vec![batch(&[], part, 0)];
        let part = pb::SnapshotPart { index: at as u32, last: at + 1 == parts, payloads, ..Default::default() };
        say.send(said(Kind::Snapshot(part))).await.ok()?;
    }
    drop(blocks);
    let (mut next, mut beat) = (next.unwrap_or(0), tokio::time::interval(Duration::from_secs(1)));
    let mut pace = tokio::time::interval(fleet.every.unwrap_or(Duration::from_secs(3600)));
    loop {
        tokio::select! {
            _ = beat.tick() => {
                let load = pb::EngineLoad {
                    prefill_tokens_per_second: 1000.0,
                    page_tokens: 16,
                    page_bytes: 1 << 20,
                    ..Default::default()
                };
                let heartbeat = pb::WatchHeartbeat { next_sequence: next, state: None, load: Some(load) };
                say.send(said(Kind::Heartbeat(heartbeat))).await.ok()?;
            }
            _ = pace.tick(), if fleet.every.is_some() => {
                let payloads = vec![fleet.batches[cache as usize][(next % MADE) as usize].clone()];
                say.send(said(Kind::Raw(pb::RawBatches { first_sequence: next, payloads }))).await.ok()?;
                next += 1;
            }
        }
    }
}

/// [1.0, [["BlockRemoved", gone, "GPU"], ["BlockStored", stored, nil, tokens, 16, nil, "GPU"]], 0]
fn batch(gone: &[u64], stored: &[u64], tokens: u16) -> Vec<u8> {
    let mut out = vec![0x93, 0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0, 0x92, 0x93];
    text(&mut out, "BlockRemoved");
    hashes(&mut out, gone);
    text(&mut out, "GPU");
    out.push(0x97);
    text(&mut out, "BlockStored");
    hashes(&mut out, stored);
    out.extend([0xc0, 0xdc]);
    out.extend(tokens.to_be_bytes());
    out.extend(std::iter::repeat_n(7, usize::from(tokens)));
    out.extend([16, 0xc0]);
    text(&mut out, "GPU");
    out.push(0);
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(0xa0 | text.len() as u8);
    out.extend(text.as_bytes());
}

fn hashes(out: &mut Vec<u8>, hashes: &[u64]) {
    out.push(0xdd);
    out.extend((hashes.len() as u32).to_be_bytes());
    for hash in hashes {
        out.push(0xcf);
        out.extend(hash.to_be_bytes());
    }
}

fn made(engine: u64) -> Vec<Vec<u8>> {
    let encoded = |(gone, stored): (Vec<u64>, Vec<u64>)| batch(&gone, &stored, 16 * BLOCKS_OF_A_BATCH as u16);
    layout::made(engine).into_iter().map(encoded).collect()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [caches, blocks, rate, layout, more @ ..] = arguments.as_slice() else {
        return Err("CACHES BLOCKS RATE LAYOUT [DP_RANKS]".into());
    };
    let layout = Layout { engines: caches.parse()?, blocks: blocks.parse()?, halves: layout == "half" };
    let dp_ranks = more.first().map_or(Ok(1), |ranks| ranks.parse())?;
    let rate: f64 = rate.parse()?;
    let every = (rate > 0.0).then(|| Duration::from_secs_f64(layout.engines as f64 / rate));
    let batches = if every.is_some() { (0..layout.engines).map(made).collect() } else { Vec::new() };
    let fleet = Fleet { every, batches, dp_ranks, layout };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    let service = EventServiceServer::new(Serving(Arc::new(fleet)));
    let server = tonic::transport::Server::builder().tcp_nodelay(true).add_service(service);
    Ok(server.serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true))).await?)
}
