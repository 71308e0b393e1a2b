//! The hierarchical cache of a rank, and an index that is asked.

use std::time::Duration;

use tokio::time::timeout;
use tonic::Streaming;

use crate::connection::{AuthorizedChannel, Dialer};
use crate::pb::index_service_client::IndexServiceClient;
use crate::pb::prefetch_service_client::PrefetchServiceClient;
use crate::pb::{self, CacheOperation};
use crate::refusal::Refusal;
use crate::repeat::{ask, silent, Pages, MOST_PAGE_ROWS, USUAL_TIMEOUT};
use crate::watch::IDLE_TIMEOUT;

/// Asks the hierarchical cache of a rank, and moves pages between its storage and its host. Calls are repeated while it is away.
#[derive(Clone)]
pub struct Prefetch {
    client: PrefetchServiceClient<AuthorizedChannel>,
    within: Duration,
}

macro_rules! asks {
    ($(#[$about:meta])* $method:ident, $request:ident, $response:ident) => {
        $(#[$about])*
        pub async fn $method(&self, request: pb::$request) -> Result<pb::$response, Refusal> {
            let call = |request| {
                let mut client = self.client.clone();
                async move { client.$method(request).await }
            };
            ask(self.within, request, call).await
        }
    };
}

impl Prefetch {
    /// The rank with pp = cp = tp = 0.
    pub fn new(dialer: &Dialer) -> Self {
        Self { client: PrefetchServiceClient::new(dialer.channel()), within: USUAL_TIMEOUT }
    }

    /// The same, whose calls take so long at most, with all repeats; 10 s otherwise.
    pub fn within(self, within: Duration) -> Self {
        Self { within, ..self }
    }

    asks! {
        /// How many leading pages of a prompt are on device, host and in storage.
        lookup, LookupRequest, LookupResponse
    }
    asks! {
        /// What the cache is made of, and how full its tiers are.
        get_cache_info, GetCacheInfoRequest, GetCacheInfoResponse
    }
    asks! {
        /// Keeps the leading pages that device and host have from eviction.
        pin_pages, PinPagesRequest, PinPagesResponse
    }
    asks! {
        /// Drops pages that nobody uses.
        purge_pages, PurgePagesRequest, PurgePagesResponse
    }
    asks! {
        /// Cuts an operation short: it as it is now, and whether it is quiescent.
        terminate_prefetch, TerminatePrefetchRequest, TerminatePrefetchResponse
    }

    /// Begins to bring pages from storage to the host. A request without an id gets one, so that a repeated call begins nothing
    /// twice.
    pub async fn start_prefetch(&self, mut request: pb::StartPrefetchRequest) -> Result<CacheOperation, Refusal> {
        name(&mut request.request_id);
        let started = ask(self.within, request, |request| {
            let mut client = self.client.clone();
            async move { client.start_prefetch(request).await }
        });
        Ok(started.await?.operation.unwrap_or_default())
    }

    /// Begins to write the leading pages that the host has to storage; otherwise as `start_prefetch`.
    pub async fn start_backup(&self, mut request: pb::StartBackupRequest) -> Result<CacheOperation, Refusal> {
        name(&mut request.request_id);
        let started = ask(self.within, request, |request| {
            let mut client = self.client.clone();
            async move { client.start_backup(request).await }
        });
        Ok(started.await?.operation.unwrap_or_default())
    }

    /// Tells the latest state of operations (none: of all), from the present on. It ends when those that are named have ended.
    pub async fn watch_operations(&self, operation_ids: Vec<String>) -> Result<OperationWatch, Refusal> {
        let mut client = self.client.clone();
        let call = client.watch_operations(pb::WatchOperationsRequest { operation_ids, ..Default::default() });
        let call = timeout(IDLE_TIMEOUT, call).await.map_err(|_| silent())??;
        Ok(OperationWatch(call.into_inner()))
    }

    /// Watches one operation to its end, also over breaks.
    pub async fn until_ended(&self, operation_id: &str) -> Result<CacheOperation, Refusal> {
        let end = tokio::time::Instant::now() + self.within;
        loop {
            match self.last_of(operation_id).await {
                Ok(Some(operation)) => return Ok(operation),
                Err(refusal) if !refusal.may_repeat() && refusal.code != tonic::Code::DeadlineExceeded => {
                    return Err(refusal)
                }
                Err(refusal) if tokio::time::Instant::now() >= end => return Err(refusal),
                Ok(None) if tokio::time::Instant::now() >= end => return Err(silent()),
                _ => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    async fn last_of(&self, operation_id: &str) -> Result<Option<CacheOperation>, Refusal> {
        let mut watch = self.watch_operations(vec![operation_id.to_owned()]).await?;
        let mut last = None;
        while let Some(mut message) = watch.next().await? {
            last = message.operations.pop().or(last);
        }
        Ok(last)
    }

    /// Prefetches and backups in the order in which they began; `open_only` leaves out those that have ended.
    pub async fn list_operations(&self, open_only: bool) -> Result<Vec<CacheOperation>, Refusal> {
        let mut request = pb::ListOperationsRequest { open_only, page_size: MOST_PAGE_ROWS, ..Default::default() };
        let mut found = Vec::new();
        let mut pages = Pages::default();
        loop {
            let page = ask(self.within, request.clone(), |request| {
                let mut client = self.client.clone();
                async move { client.list_operations(request).await }
            });
            let mut page = page.await?;
            found.append(&mut page.operations);
            if !pages.go_on(&page.next_page_token)? {
                return Ok(found);
            }
            request.page_token = page.next_page_token;
        }
    }
}

/// What a rank says of its operations.
pub struct OperationWatch(Streaming<pb::WatchOperationsResponse>);

impl OperationWatch {
    /// The next message; None: all that were named have ended.
    pub async fn next(&mut self) -> Result<Option<pb::WatchOperationsResponse>, Refusal> {
        Ok(timeout(IDLE_TIMEOUT, self.0.message()).await.map_err(|_| silent())??)
    }
}

fn name(request_id: &mut String) {
    if request_id.is_empty() {
        *request_id = format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..));
    }
}

/// Asks an index (`kvgrpc serve index`) who holds the beginnings of requests. Calls are repeated while it is away.
#[derive(Clone)]
pub struct Index {
    client: IndexServiceClient<AuthorizedChannel>,
    within: Duration,
}

impl Index {
    /// An index.
    pub fn new(dialer: &Dialer) -> Self {
        Self { client: IndexServiceClient::new(dialer.channel()), within: USUAL_TIMEOUT }
    }

    /// The same, whose calls take so long at most, with all repeats; 10 s otherwise.
    pub fn within(self, within: Duration) -> Self {
        Self { within, ..self }
    }

    asks! {
        /// Of each prompt how many of its leading blocks each cache holds.
        score, ScoreRequest, ScoreResponse
    }
    asks! {
        /// Of each request where to run it, and from whom to pull which part of its prompt. With `reserve` a repeated call may
        /// count a request twice, for the second until its engine tells what it has to do.
        plan, PlanRequest, PlanResponse
    }
    asks! {
        /// A page of the caches that are followed, how many are in which state, and what cannot be followed.
        list_sources, ListSourcesRequest, ListSourcesResponse
    }
}
