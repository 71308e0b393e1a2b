//! Client of kvgrpc, the control plane for KV-cache hand-offs between LLM engines.
//!
//! [`connect`] opens a channel on which every call carries a token; [`pb`] has the generated clients of all services, and
//! [`Refusal`] what a server says when it refuses: the reason, its metadata, and when to ask again.
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

mod connection;
mod refusal;
mod token;

pub use connection::{connect, AuthorizedChannel, Error, Options};
pub use refusal::Refusal;
pub use token::{authorization, target_of, Authorize, SHORTEST_SECRET};

/// Messages and clients of `kvgrpc.v1`, generated from the protos.
#[allow(missing_docs, clippy::all)]
pub mod pb {
    include!("gen/kvgrpc.v1.rs");
}
