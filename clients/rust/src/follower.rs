//! What follows one stream of events over the network.

use std::sync::Arc;

use tonic::{Status, Streaming};

use crate::cache::Cache;
use crate::connection::{AuthorizedChannel, Dialer};
use crate::connections::{Connection, Connections};
use crate::contents::Verdict;
use crate::pb::{event_service_client::EventServiceClient, WatchRequest, WatchResponse};
use crate::watch::{Calls, Item, Listener, Messages, Stream, Watcher};

/// Follows a stream without end, over breaks and restarts: `while let item = watch.next().await`.
///
/// It begins with a snapshot, goes on behind the last batch where a connection broke, and takes another snapshot where the log
/// moved on or another one began; each snapshot begins with Reset. No failure ends it: each pause begins with Failed.
pub struct Watch(Watcher<Publisher, ()>);

impl Watch {
    /// Follows a stream of the process that is dialled. Nothing is asked before `next` is.
    pub fn new(dialer: Dialer, stream: Stream) -> Self {
        Self(Watcher::new(Publisher::new(dialer), (), stream))
    }

    /// What it says next. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Item {
        self.0.next().await
    }
}

/// A Watch with a cache that hears everything before it is told, and that begins again with a snapshot where its digest differs
/// from the publisher's: the exact contents of one cache, kept so.
pub struct EventFollower(Watcher<Publisher, Cache>);

impl EventFollower {
    /// Follows a stream of the process that is dialled. Nothing is asked before `next` is.
    pub fn new(dialer: Dialer, stream: Stream) -> Self {
        Self(Watcher::new(Publisher::new(dialer), Cache::new(), stream))
    }

    /// What it heard next. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Item {
        self.0.next().await
    }

    /// The contents, after what `next` told last.
    pub fn cache(&self) -> &Cache {
        &self.0.listener
    }
}

impl Listener for Cache {
    fn hear(&mut self, item: &mut Item) -> Verdict {
        Cache::hear(self, item)
    }
}

/// Makes the calls, on another connection where the one before was of no use.
pub(crate) struct Publisher {
    dialer: Dialer,
    connections: Arc<Connections>,
    connection: Option<Connection>,
}

impl Publisher {
    pub(crate) fn new(dialer: Dialer) -> Self {
        Self::sharing(dialer, Arc::default())
    }

    /// With the other followers of these.
    pub(crate) fn sharing(dialer: Dialer, connections: Arc<Connections>) -> Self {
        Self { dialer, connections, connection: None }
    }
}

impl Calls for Publisher {
    type Call = Streaming<WatchResponse>;

    async fn watch(&mut self, request: WatchRequest) -> Result<Self::Call, Status> {
        let connection = self.connection.get_or_insert_with(|| self.connections.take(&self.dialer));
        let channel = AuthorizedChannel::clone(connection);
        Ok(EventServiceClient::new(channel).watch(request).await?.into_inner())
    }

    fn leave(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.connections.leave(&self.dialer, &connection);
        }
    }
}

impl Messages for Streaming<WatchResponse> {
    async fn next(&mut self) -> Result<Option<WatchResponse>, Status> {
        self.message().await
    }
}
