//! Who serves what.

use std::time::Duration;

use tonic::Streaming;

use crate::connection::{AuthorizedChannel, Dialer};
use crate::pb::registry_service_client::RegistryServiceClient;
use crate::pb::{self, Engine, RankRow, Role};
use crate::refusal::Refusal;
use crate::registration::Registration;
use crate::repeat::{ask, silent, Pages, MOST_PAGE_ROWS, USUAL_TIMEOUT};
use crate::silence::heard_within;

pub(crate) type Client = RegistryServiceClient<AuthorizedChannel>;

/// A registry says something each 5 s.
const IDLE: Duration = Duration::from_secs(15);

/// Asks a registry who serves what, and keeps rows of this process there. Reads are repeated while it is away.
#[derive(Clone)]
pub struct Registry {
    client: Client,
    replicas: Vec<Dialer>,
    within: Duration,
}

/// A list of engines, by name.
#[derive(Debug, Clone, Default)]
pub struct Engines {
    /// The engines.
    pub engines: Vec<Engine>,
    /// The registry started a moment ago, and there may be more.
    pub warming_up: bool,
}

impl Registry {
    /// A registry, and replicas of it: a Registration goes on at the next one where one does not answer.
    pub fn new(dialer: Dialer, replicas: Vec<Dialer>) -> Self {
        let client = Client::new(dialer.channel());
        Self { client, replicas: [vec![dialer], replicas].concat(), within: USUAL_TIMEOUT }
    }

    /// The same, whose calls take so long at most, with all repeats; 10 s otherwise.
    pub fn within(self, within: Duration) -> Self {
        Self { within, ..self }
    }

    /// One engine with all of its rows.
    pub async fn get_engine(&self, engine: &str) -> Result<Engine, Refusal> {
        let mut request =
            pb::GetEngineRequest { engine: engine.to_owned(), page_size: MOST_PAGE_ROWS, ..Default::default() };
        let mut rows: Vec<RankRow> = Vec::new();
        let mut pages = Pages::default();
        loop {
            let page = ask(self.within, request.clone(), |request| {
                let mut client = self.client.clone();
                async move { client.get_engine(request).await }
            });
            let page = page.await?;
            let mut found = page.engine.unwrap_or_default();
            rows.append(&mut found.rows);
            if !pages.go_on(&page.next_page_token)? {
                return Ok(Engine { rows, ..found });
            }
            request.page_token = page.next_page_token;
        }
    }

    /// All engines of a role (unspecified: of any), with their rows where that is asked for.
    pub async fn list_engines(&self, role: Role, include_rows: bool) -> Result<Engines, Refusal> {
        let mut request =
            pb::ListEnginesRequest { role: role.into(), include_rows, page_size: MOST_PAGE_ROWS, ..Default::default() };
        let mut found = Engines::default();
        let mut pages = Pages::default();
        loop {
            let page = ask(self.within, request.clone(), |request| {
                let mut client = self.client.clone();
                async move { client.list_engines(request).await }
            });
            let mut page = page.await?;
            found.engines.append(&mut page.engines);
            found.warming_up |= page.warming_up;
            if !pages.go_on(&page.next_page_token)? {
                return Ok(found);
            }
            request.page_token = page.next_page_token;
        }
    }

    /// An engine with the rows that any of the selectors fits; with `wait_ready` once it is READY.
    pub async fn resolve_ranks(&self, request: pb::ResolveRanksRequest) -> Result<Engine, Refusal> {
        let resolved = ask(self.within, request, |request| {
            let mut client = self.client.clone();
            async move { client.resolve_ranks(request).await }
        });
        Ok(resolved.await?.engine.unwrap_or_default())
    }

    /// Tells the full state of the registry, then what changes. It ends with a refusal, and is not resumed by itself: watch again.
    pub async fn watch_engines(&self, request: pb::WatchEnginesRequest) -> Result<EngineWatch, Refusal> {
        let mut client = self.client.clone();
        let call = heard_within(IDLE, client.watch_engines(request)).await.ok_or_else(silent)??;
        Ok(EngineWatch(call.into_inner()))
    }

    /// Registers rows, again while the registry is away or asks for time; then it looks after them until it is closed. Where the
    /// refusal says STALE_EPOCH, an epoch above its metadata's currentEpoch would be taken.
    pub async fn register(&self, rows: Vec<RankRow>) -> Result<Registration, Refusal> {
        Registration::begin(self.replicas.clone(), rows, self.within).await
    }
}

/// What a registry says of its engines.
pub struct EngineWatch(Streaming<pb::WatchEnginesResponse>);

impl EngineWatch {
    /// The next message; None: the registry ended it. One that said nothing for 15 s is taken for gone.
    pub async fn next(&mut self) -> Result<Option<pb::WatchEnginesResponse>, Refusal> {
        Ok(heard_within(IDLE, self.0.message()).await.ok_or_else(silent)??)
    }
}
