//! Connections of many followers: those of one address share them. A relay, or an engine of one process, serves the streams of many
//! caches, and a process has tens of thousands of descriptors at most.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::connection::{AuthorizedChannel, Dialer};

/// Servers take a hundred calls on a connection, or more.
const STREAMS_OF_A_CONNECTION: usize = 64;

/// One connection, as long as a follower has it.
pub(crate) type Connection = Arc<AuthorizedChannel>;

#[derive(Default)]
pub(crate) struct Connections(Mutex<HashMap<String, Vec<Weak<AuthorizedChannel>>>>);

impl Connections {
    /// One that has room, or a new one.
    pub(crate) fn take(&self, dialer: &Dialer) -> Connection {
        let mut all = self.0.lock();
        if all.len().is_power_of_two() {
            all.retain(|_, open| open.iter().any(|connection| connection.strong_count() > 0));
        }
        let open = all.entry(dialer.target().to_owned()).or_default();
        open.retain(|connection| connection.strong_count() > 0);
        let roomy = open.iter().find(|connection| connection.strong_count() < STREAMS_OF_A_CONNECTION);
        if let Some(connection) = roomy.and_then(Weak::upgrade) {
            return connection;
        }
        let connection = Arc::new(dialer.following());
        open.push(Arc::downgrade(&connection));
        connection
    }

    /// It is of no use: nobody takes it any more. Those who have it find out for themselves.
    pub(crate) fn leave(&self, dialer: &Dialer, connection: &Connection) {
        let mut all = self.0.lock();
        let Some(open) = all.get_mut(dialer.target()) else { return };
        open.retain(|other| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), Arc::as_ptr(connection)));
        if open.is_empty() {
            all.remove(dialer.target());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;

    #[tokio::test]
    async fn followers_of_one_address_share_connections_until_one_is_of_no_use() {
        let dialer = |address| Dialer::new(address, Options::default()).unwrap();
        let (one, other, connections) = (dialer("127.0.0.1:1"), dialer("127.0.0.1:2"), Connections::default());
        let taken: Vec<Connection> = (0..STREAMS_OF_A_CONNECTION).map(|_| connections.take(&one)).collect();
        assert!(taken.iter().all(|each| Arc::ptr_eq(each, &taken[0])));
        let (next, of_other) = (connections.take(&one), connections.take(&other));
        assert!(!Arc::ptr_eq(&next, &taken[0]) && !Arc::ptr_eq(&next, &of_other));
        // Those that have it find out for themselves.
        connections.leave(&one, &taken[0]);
        assert!(Arc::ptr_eq(&connections.take(&one), &next));
        connections.leave(&one, &taken[1]);
        drop(taken);
        assert!(Arc::ptr_eq(&connections.take(&one), &next));
        drop((next, of_other));
        connections.take(&dialer("127.0.0.1:3"));
        assert!(connections.0.lock().len() <= 2, "addresses that nobody follows are forgotten");
    }
}
