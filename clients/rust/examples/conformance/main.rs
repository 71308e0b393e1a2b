//! The Rust driver of tests/conformance/scenarios: a command of JSON on each line of its input, one line of answer each.

mod followed;
mod lines;

use std::collections::HashMap;
use std::time::Duration;

use kvgrpc::pb::{self, registry_service_client::RegistryServiceClient};
use kvgrpc::{Dialer, Error, Index, Options, Prefetch, Refusal, Registration, RegistrationState, Registry};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, BufReader};
use tonic::transport::{Certificate, ClientTlsConfig};

use followed::{Followed, Watched};
use lines::Row;

const USUAL_MS: u64 = 20_000;
const LOOK: Duration = Duration::from_millis(10);

type Answer = Result<String, Error>;

/// Every field that any command may have.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Command {
    op: String,
    #[serde(rename = "as")]
    name: String,
    address: String,
    ca: String,
    secret: Option<String>,
    within_ms: Option<u64>,
    timeout_ms: u64,
    engine: String,
    role: String,
    rows: Vec<Row>,
    wait_ready: bool,
    state: String,
    ranks: u32,
    next: String,
    hash: String,
    medium: String,
    hashes: Vec<String>,
    model: String,
    engines: Vec<String>,
    max_scores: u32,
    max_placements: u32,
    first_token: u64,
    tokens: u64,
    request_id: String,
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let mut driver = Driver::default();
    let mut input = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = input.next_line().await? {
        println!("{}", driver.answer(&serde_json::from_str(&line)?).await);
    }
    Ok(())
}

#[derive(Default)]
struct Driver {
    dialers: HashMap<String, Dialer>,
    registrations: HashMap<String, Registration>,
    watches: HashMap<String, Watched>,
    followers: HashMap<String, Followed>,
    operations: HashMap<String, (Prefetch, String)>,
}

impl Driver {
    async fn answer(&mut self, asked: &Command) -> String {
        let within = Duration::from_millis(asked.within_ms.unwrap_or(USUAL_MS));
        match tokio::time::timeout(within, self.act(asked)).await {
            Err(_) => "timeout".to_owned(),
            Ok(Ok(line)) => line,
            Ok(Err(Error::Refused(refusal))) => lines::refusal(&refusal),
            Ok(Err(error)) => format!("failed: {error}"),
        }
    }

    async fn act(&mut self, asked: &Command) -> Answer {
        match asked.op.as_str() {
            "register" => self.register(asked).await,
            "state" => Ok(self.state(asked).await),
            "get_engine" => Ok(lines::engine(&self.registry(asked)?.get_engine(&asked.engine).await?)),
            "refuse" => self.refuse(asked).await,
            "resolve_ranks" => self.resolve_ranks(asked).await,
            "list_engines" => self.list_engines(asked).await,
            "watch_engines" => self.watch_engines(asked),
            "until_engine" => Ok(self.watches[&asked.name].until_engine(&asked.engine, asked.ranks).await),
            "follow" => self.follow(asked),
            "until_current" => Ok(self.followers[&asked.name].until_current(number(&asked.next)).await),
            "until_failed" => Ok(self.followers[&asked.name].until_failed().await),
            "counts" => Ok(self.followers[&asked.name].counts()),
            "holds" => Ok(self.followers[&asked.name].holds(&asked.medium, number(&asked.hash)).await),
            "close" => self.close(&asked.name).await,
            "score" => self.score(asked).await,
            "plan" => self.plan(asked).await,
            "lookup" => self.lookup(asked).await,
            "start_prefetch" => self.start_prefetch(asked).await,
            "until_ended" => self.until_ended(&asked.name).await,
            "terminate_prefetch" => self.terminate_prefetch(&asked.name).await,
            other => Ok(format!("no such command: {other}")),
        }
    }

    async fn register(&mut self, asked: &Command) -> Answer {
        let registration = self.registry(asked)?.register(asked.rows.iter().map(Row::message).collect()).await?;
        self.registrations.insert(asked.name.clone(), registration);
        Ok("registered".to_owned())
    }

    async fn state(&self, asked: &Command) -> String {
        let registration = &self.registrations[&asked.name];
        loop {
            match registration.state() {
                RegistrationState::Registered if asked.state == "registered" => return asked.state.clone(),
                RegistrationState::Superseded if asked.state == "superseded" => {
                    let newest = registration.superseded().pop().map_or(0, |taken| taken.epoch);
                    return format!("superseded epoch={newest}");
                }
                _ => tokio::time::sleep(LOOK).await,
            }
        }
    }

    /// By the generated client, once.
    async fn refuse(&mut self, asked: &Command) -> Answer {
        let mut client = RegistryServiceClient::new(self.dial(asked, &asked.address)?.channel());
        let request = pb::GetEngineRequest { engine: asked.engine.clone(), ..Default::default() };
        let found = client.get_engine(request).await.map_err(Refusal::from)?.into_inner();
        Ok(lines::engine(&found.engine.unwrap_or_default()))
    }

    async fn resolve_ranks(&mut self, asked: &Command) -> Answer {
        let registry = self.registry(asked)?.within(Duration::from_millis(asked.timeout_ms));
        let request = pb::ResolveRanksRequest {
            engine: asked.engine.clone(),
            role: lines::role_of(&asked.role).into(),
            wait_ready: asked.wait_ready,
            selectors: vec![pb::RankSelector::default()],
            ..Default::default()
        };
        Ok(lines::engine(&registry.resolve_ranks(request).await?))
    }

    async fn list_engines(&mut self, asked: &Command) -> Answer {
        let listed = self.registry(asked)?.list_engines(pb::Role::Unspecified, false).await?;
        Ok(lines::joined(listed.engines.iter().map(lines::head), ", "))
    }

    fn watch_engines(&mut self, asked: &Command) -> Answer {
        let watched = Watched::begin(self.registry(asked)?);
        self.watches.insert(asked.name.clone(), watched);
        Ok("watching".to_owned())
    }

    fn follow(&mut self, asked: &Command) -> Answer {
        let followed = Followed::begin(self.dial(asked, &asked.address)?);
        self.followers.insert(asked.name.clone(), followed);
        Ok("following".to_owned())
    }

    async fn close(&mut self, name: &str) -> Answer {
        if let Some(registration) = self.registrations.remove(name) {
            registration.close().await?;
        }
        self.watches.remove(name);
        self.followers.remove(name);
        Ok("closed".to_owned())
    }

    async fn score(&mut self, asked: &Command) -> Answer {
        let request = pb::ScoreRequest {
            prompts: vec![prompt_of(asked)],
            engines: asked.engines.clone(),
            max_scores: asked.max_scores,
            ..Default::default()
        };
        let scored = Index::new(&self.dial(asked, &asked.address)?).score(request).await?;
        Ok(lines::joined(scored.prompts[0].scores.iter().map(lines::score), ", "))
    }

    async fn plan(&mut self, asked: &Command) -> Answer {
        let (prompt, engines) = (Some(prompt_of(asked)), asked.engines.clone());
        let request = pb::PlanRequest {
            prompts: vec![pb::PlanPrompt { prompt, engines, ..Default::default() }],
            max_placements: asked.max_placements,
            ..Default::default()
        };
        let planned = Index::new(&self.dial(asked, &asked.address)?).plan(request).await?;
        Ok(lines::joined(planned.plans[0].placements.iter().map(lines::placement), ", "))
    }

    async fn lookup(&mut self, asked: &Command) -> Answer {
        let request = pb::LookupRequest { pages: Some(pages_of(asked)), ..Default::default() };
        let found = Prefetch::new(&self.dial(asked, &asked.address)?).lookup(request).await?;
        Ok(lines::lookup(&found))
    }

    async fn start_prefetch(&mut self, asked: &Command) -> Answer {
        let prefetch = Prefetch::new(&self.dial(asked, &asked.address)?);
        let (pages, request_id) = (Some(pages_of(asked)), asked.request_id.clone());
        let request = pb::StartPrefetchRequest { pages, request_id, ..Default::default() };
        let operation = prefetch.start_prefetch(request).await?;
        self.operations.insert(asked.name.clone(), (prefetch, operation.operation_id));
        Ok("started".to_owned())
    }

    async fn until_ended(&self, name: &str) -> Answer {
        let (prefetch, operation_id) = &self.operations[name];
        Ok(lines::operation(&prefetch.until_ended(operation_id).await?))
    }

    async fn terminate_prefetch(&self, name: &str) -> Answer {
        let (prefetch, operation_id) = &self.operations[name];
        let request = pb::TerminatePrefetchRequest { operation_id: operation_id.clone() };
        let ended = prefetch.terminate_prefetch(request).await?;
        Ok(lines::operation(&ended.operation.unwrap_or_default()))
    }

    fn registry(&mut self, asked: &Command) -> Result<Registry, Error> {
        let replicas: Result<Vec<_>, _> = asked.address.split(',').map(|address| self.dial(asked, address)).collect();
        let mut replicas = replicas?;
        let first = replicas.remove(0);
        Ok(Registry::new(first, replicas))
    }

    fn dial(&mut self, asked: &Command, address: &str) -> Result<Dialer, Error> {
        if let Some(known) = self.dialers.get(address) {
            return Ok(known.clone());
        }
        let mut options = Options { secret: asked.secret.clone(), ..Options::default() };
        if !asked.ca.is_empty() {
            let authority = std::fs::read(&asked.ca).expect("the scenario names a file");
            options.tls = Some(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority)));
        }
        let dialer = Dialer::new(address, options)?;
        self.dialers.insert(address.to_owned(), dialer.clone());
        Ok(dialer)
    }
}

fn prompt_of(asked: &Command) -> pb::ScorePrompt {
    let values = asked.hashes.iter().map(|hash| number(hash)).collect();
    let prefix = Some(pb::score_prompt::Prefix::BlockHashes(pb::BlockHashes { values }));
    pb::ScorePrompt { prefix, model: asked.model.clone(), ..Default::default() }
}

fn pages_of(asked: &Command) -> pb::PromptPages {
    pb::PromptPages { tokens: (asked.first_token..asked.first_token + asked.tokens).collect(), ..Default::default() }
}

fn number(text: &str) -> u64 {
    text.parse().expect("numbers of commands are decimal text")
}
