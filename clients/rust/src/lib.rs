//! Client of kvgrpc, the control plane for KV-cache hand-offs between LLM engines.
//!
//! [`connect`] opens a channel on which every call carries a token; [`pb`] has the generated clients of all services, and
//! [`Refusal`] what a server says when it refuses: the reason, its metadata, and when to ask again. [`Watch`] follows the KV
//! events of an engine over breaks and restarts, and [`EventFollower`] keeps the contents of its cache by them.
//!
//! ```no_run
//! # async fn example() -> Result<(), kvgrpc::Error> {
//! use kvgrpc::{connect, pb, Options};
//!
//! let channel = connect("127.0.0.1:8998", Options::default()).await?;
//! let mut registry = pb::registry_service_client::RegistryServiceClient::new(channel);
//! let engines = registry
//!     .list_engines(pb::ListEnginesRequest::default())
//!     .await
//!     .map_err(kvgrpc::Refusal::from)?
//!     .into_inner()
//!     .engines;
//! # Ok(())
//! # }
//! ```

mod batch;
mod blocks;
mod cache;
mod connection;
mod connections;
mod contents;
mod entries;
mod fields;
mod follower;
mod groups;
mod hashes;
mod holders;
mod index;
mod indexes;
mod msgpack;
mod prefetch;
mod refusal;
mod registration;
mod registry;
mod repeat;
mod silence;
#[cfg(test)]
mod tests;
mod token;
mod watch;

pub use batch::{decode_batch, Batch, BlockHash, BlockRemoved, BlockStored, Event, NotABatch};
pub use cache::Cache;
pub use connection::{connect, AuthorizedChannel, Dialer, Error, Options};
pub use contents::{Place, Verdict, MAX_MEDIUM_BYTES, MAX_PLACES};
pub use follower::{EventFollower, Watch};
pub use index::{Dial, IndexOptions, ModelNeeded, PlanQuestion, Planning, PrefixIndex, Question, SourcesPage, Wanted};
pub use indexes::Indexes;
pub use msgpack::Value;
pub use prefetch::{Index, OperationWatch, Prefetch};
pub use refusal::Refusal;
pub use registration::{Registration, RegistrationState, Supersession};
pub use registry::{EngineWatch, Engines, Registry};
pub use token::{authorization, target_of, Authorize, Proven, Secrets, SHORTEST_SECRET};
pub use watch::{Cause, Item, Stream};

/// Messages and clients of `kvgrpc.v1`, generated from the protos.
#[allow(missing_docs, clippy::all)]
pub mod pb {
    pub use crate::hashes::BlockHashes;

    include!("gen/kvgrpc.v1.rs");
}
