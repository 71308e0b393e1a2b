//! `kvgrpc-index`: who holds the beginning of a request, for routers. The contract of `kvgrpc serve index`, served natively.

mod admission;
mod latency;
mod limits;
mod listening;
mod names;
mod proof;
mod refusals;
mod runtimes;
mod service;
mod status;
mod turns;

use std::future::Future;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use clap::Parser;
use kvgrpc::pb::index_service_server::IndexServiceServer;
use kvgrpc::pb::server_service_server::ServerServiceServer;
use kvgrpc::{Dialer, IndexOptions, Options, PrefixIndex};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::signal::unix::{signal, SignalKind};
use tonic::server::NamedService;
use tonic::transport::{Certificate, ClientTlsConfig, Identity, Server, ServerTlsConfig};
use tonic_health::server::HealthReporter;
use tonic_health::ServingStatus;

use crate::admission::Admission;
use crate::limits::Limits;
use crate::listening::{resolved, Listen};
use crate::proof::Proof;
use crate::runtimes::Runtimes;
use crate::service::Index;
use crate::status::{Status, LOOK_INTERVAL};
use crate::turns::Turns;

/// What a question may take: 65,536 blocks, names of 1,024 engines.
const LARGEST_REQUEST: usize = (4 << 20) + (64 << 10);
const LARGEST_HEAD: u32 = 16 << 10;
const MAX_CALLS_OF_A_CONNECTION: u32 = 256;
/// Of a call, its request included: who says more slowly what he asks is not waited for.
const LONGEST_CALL: Duration = Duration::from_secs(60);
const LONGEST_HANDSHAKE: Duration = Duration::from_secs(10);
/// Others see that it drains, and ask elsewhere.
const LAST_CALLS: Duration = Duration::from_millis(500);
const SAVE_AT_END: Duration = Duration::from_secs(5);
const CONTRACT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/contract.binpb"));

/// Follows the caches of many engines, and tells routers who holds the beginning of a request.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// HOST:PORT (port 0: a free one) or unix:/path.
    #[arg(long, default_value = "127.0.0.1:8997", env = "KVGRPC_LISTEN")]
    listen: String,
    /// Follow every engine that this registry lists (replicas: with commas).
    #[arg(long, default_value = "", env = "KVGRPC_REGISTRY")]
    registry: String,
    /// Follow the streams of the rank at this HOST:PORT; may be repeated.
    #[arg(long = "source")]
    sources: Vec<String>,
    /// Serve TLS with this certificate (PEM).
    #[arg(long, env = "KVGRPC_CERT_FILE", requires = "key_file")]
    cert_file: Option<String>,
    /// Key of the certificate.
    #[arg(long, env = "KVGRPC_KEY_FILE", requires = "cert_file")]
    key_file: Option<String>,
    /// Callers need a certificate that this signs (PEM): a name in it ends in their role, as in router-a.consumer.
    #[arg(long, env = "KVGRPC_CLIENT_CA_FILE", requires = "cert_file")]
    client_ca_file: Option<String>,
    /// Callers prove a secret of this file: a line each, ROLE [NAME]:SECRET with rank, consumer or operator.
    #[arg(long, env = "KVGRPC_TOKENS_FILE")]
    tokens_file: Option<String>,
    /// Tokens may name these: addresses by which clients dial it, besides --listen.
    #[arg(long, value_delimiter = ',', env = "KVGRPC_AUDIENCE")]
    audience: Vec<String>,
    /// Call ranks with TLS; who signs them.
    #[arg(long, env = "KVGRPC_CA_FILE")]
    ca_file: Option<String>,
    /// Call ranks with the secret in this file.
    #[arg(long, env = "KVGRPC_TOKEN_FILE")]
    token_file: Option<String>,
    /// Save what it knows there, and go on from it at a start.
    #[arg(long)]
    saved: Option<PathBuf>,
    /// Health checks need a token too, as watches of health do.
    #[arg(long)]
    health_needs_token: bool,
    /// Calls at once, of all callers and of one, as JSON: '{"unary": 1024}' (docs/bounds.md).
    #[arg(long, default_value = "", env = "KVGRPC_CALL_LIMITS")]
    call_limits: String,
    /// HOST:PORT of /metrics, /livez and /readyz, over plain HTTP and without names.
    #[arg(long, env = "KVGRPC_METRICS_LISTEN")]
    metrics_listen: Option<String>,
    /// End when standard input does: whoever started it is gone.
    #[arg(long)]
    until_eof: bool,
    /// Plaintext on an address that others reach, and tokens in it, are meant.
    #[arg(long, env = "KVGRPC_INSECURE")]
    insecure: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match Runtimes::new().and_then(|runtimes| runtimes.run(|following| serve(arguments, following))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("kvgrpc-index: {why}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(arguments: Arguments, following: Handle) -> Result<(), String> {
    let call_limits = limits::parse(&arguments.call_limits)?;
    let listen = Listen::read(&arguments.listen).await?;
    check_reach(&arguments, &listen)?;
    let listener = listen.bind().await?;
    let bound = listener.bound()?;
    let asks_certificates = arguments.client_ca_file.is_some();
    let tokens_file = arguments.tokens_file.clone();
    let proof = Proof::new(tokens_file, asks_certificates, &arguments.listen, &bound, &arguments.audience)?;
    let index = Index {
        index: Arc::new(follow(options(&arguments)?, &following)?),
        draining: Arc::new(AtomicBool::new(false)),
        ending: Arc::default(),
        counts: Arc::default(),
        call_limits,
        limits: Limits::new(&call_limits),
        began: SystemTime::now(),
        turns: Turns::new(std::thread::available_parallelism().map_or(1, usize::from)),
    };
    let status = Status::new(index.index.clone(), index.counts.clone(), index.draining.clone());
    if let Some(listen) = &arguments.metrics_listen {
        let listener = TcpListener::bind(resolved(listen).await?).await;
        let listener = listener.map_err(|error| format!("metrics-listen: {listen}: {error}"))?;
        println!("metrics at {}", listener.local_addr().map_err(|error| error.to_string())?);
        tokio::spawn(status.clone().serve(listener));
    }
    let scores = IndexServiceServer::new(index.clone()).max_decoding_message_size(LARGEST_REQUEST);
    let info = ServerServiceServer::new(index.clone());
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_not_serving::<IndexServiceServer<Index>>().await;
    health.set_serving::<ServerServiceServer<Index>>().await;
    health.set_service_status("", ServingStatus::NotServing).await;
    let looking = tokio::spawn(tell_health(status, health.clone()));
    let server = builder(&arguments)?
        .layer(Admission::new(proof, index.limits.clone(), arguments.health_needs_token))
        .add_service(scores)
        .add_service(info)
        .add_service(health_service)
        .add_service(reflection().build_v1().map_err(|error| error.to_string())?)
        .add_service(reflection().build_v1alpha().map_err(|error| error.to_string())?);
    // Whoever reads where it listens may end it at once.
    let stopped = stopped(arguments.until_eof).map_err(|error| error.to_string())?;
    println!("kvgrpc index listens on {bound}");
    let until_signal = async {
        stopped.await;
        index.ending.store(true, Ordering::Relaxed);
        index.draining.store(true, Ordering::Relaxed);
        looking.abort();
        health.set_not_serving::<IndexServiceServer<Index>>().await;
    };
    let (stop, stops) = tokio::sync::oneshot::channel::<()>();
    let mut serving = listener.serve(server, async { drop(stops.await) });
    tokio::select! {
        ended = &mut serving => return ended.map_err(|error| error.to_string()),
        () = until_signal => {}
    }
    let _ = stop.send(());
    let _ = tokio::time::timeout(LAST_CALLS, serving).await;
    index.index.save(SAVE_AT_END).await;
    Ok(())
}

/// An index whose followers run there.
fn follow(options: IndexOptions, following: &Handle) -> Result<PrefixIndex, String> {
    let _entered = following.enter();
    PrefixIndex::new(options).map_err(|error| error.to_string())
}

/// The contract as generic clients ask for it.
fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(CONTRACT)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .with_service_name(IndexServiceServer::<Index>::NAME)
        .with_service_name(ServerServiceServer::<Index>::NAME)
        .with_service_name("grpc.health.v1.Health")
}

/// SERVING while routers may be sent here.
async fn tell_health(status: Status, health: HealthReporter) {
    let mut look = tokio::time::interval(LOOK_INTERVAL);
    loop {
        look.tick().await;
        let told = if status.is_ready() { ServingStatus::Serving } else { ServingStatus::NotServing };
        health.set_service_status(IndexServiceServer::<Index>::NAME, told).await;
        health.set_service_status("", told).await;
    }
}

/// Nothing that others can reach is unprotected, but where that is meant.
fn check_reach(arguments: &Arguments, listen: &Listen) -> Result<(), String> {
    if arguments.insecure || listen.is_local() {
        return Ok(());
    }
    let needed = match (&arguments.cert_file, arguments.tokens_file.as_ref().or(arguments.client_ca_file.as_ref())) {
        (None, _) => "there is no TLS: give --cert-file and --key-file",
        (_, None) => "everybody could call it: give --tokens-file or --client-ca-file",
        _ => return Ok(()),
    };
    Err(format!("{listen} is not loopback and {needed}, or allow it with --insecure"))
}

fn options(arguments: &Arguments) -> Result<IndexOptions, String> {
    let secret = match &arguments.token_file {
        Some(path) => Some(read(path)?.trim().to_owned()),
        None => None,
    };
    let tls = match &arguments.ca_file {
        Some(path) => Some(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(path)?))),
        None => None,
    };
    let options = Options { secret, audience: None, insecure: arguments.insecure, tls };
    let registries = arguments.registry.split(',').filter(|address| !address.is_empty()).map(str::to_owned);
    Ok(IndexOptions {
        registries: registries.collect(),
        sources: arguments.sources.clone(),
        saved: arguments.saved.clone(),
        dial: Arc::new(move |address| Dialer::new(address, options.clone())),
    })
}

fn builder(arguments: &Arguments) -> Result<Server, String> {
    let server = Server::builder()
        .max_concurrent_streams(MAX_CALLS_OF_A_CONNECTION)
        .http2_max_header_list_size(LARGEST_HEAD)
        .timeout(LONGEST_CALL)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20)
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)));
    let (Some(cert), Some(key)) = (&arguments.cert_file, &arguments.key_file) else { return Ok(server) };
    let mut tls =
        ServerTlsConfig::new().identity(Identity::from_pem(read(cert)?, read(key)?)).timeout(LONGEST_HANDSHAKE);
    if let Some(ca) = &arguments.client_ca_file {
        tls = tls.client_ca_root(Certificate::from_pem(read(ca)?));
    }
    server.tls_config(tls).map_err(|error| format!("cert-file, key-file: {error}"))
}

fn read(path: &str) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))
}

/// SIGTERM or Ctrl-C, from now on; the end of standard input too where that is meant.
fn stopped(until_eof: bool) -> std::io::Result<impl Future<Output = ()>> {
    let (mut term, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = interrupt.recv() => {}
            () = end_of_input(), if until_eof => {}
        }
    })
}

/// On a thread of its own: tokio's would keep the process from ending while it reads.
async fn end_of_input() {
    let (tell, told) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        drop(tell);
    });
    let _ = told.await;
}
