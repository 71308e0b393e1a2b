//! What a server says when it refuses a call.

use std::collections::HashMap;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::pb::ErrorReason;

const DOMAIN: &str = "kvgrpc.dev";

/// A refused call: the status, and what kvgrpc's error details add to it.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}: {message}", self.name())]
pub struct Refusal {
    /// The status code.
    pub code: Code,
    /// What happened, for people.
    pub message: String,
    /// Why, for programs; `Unspecified` where a library or the network refused, or a newer server has a newer reason.
    pub reason: ErrorReason,
    /// What the reason is about, by the keys that docs/errors.md lists.
    pub metadata: HashMap<String, String>,
    /// Before which another try is of no use; None: the server did not say.
    pub retry_after: Option<Duration>,
}

impl Refusal {
    /// Whether the same call may be repeated: nobody answered, or the server said when to.
    pub fn may_repeat(&self) -> bool {
        self.code == Code::Unavailable || self.retry_after.is_some()
    }

    /// Whether time alone can hardly mend it. Somebody answered here once, where `begun`: before, what libraries call a stream that
    /// a proxy reset is whatever answers there.
    pub(crate) fn is_lasting(&self, begun: bool) -> bool {
        match self.code {
            Code::Cancelled | Code::Aborted | Code::DeadlineExceeded => false,
            Code::Internal | Code::Unknown => !begun && !self.may_repeat(),
            _ => !self.may_repeat(),
        }
    }

    /// Whether a server refused a snapshot because it keeps none, or is older than snapshots.
    pub(crate) fn keeps_none(&self) -> bool {
        match self.reason {
            ErrorReason::FeatureDisabled => true,
            ErrorReason::InvalidRequest => self.metadata.get("field").is_some_and(|field| field == "mode"),
            _ => false,
        }
    }

    fn name(&self) -> String {
        match self.reason {
            ErrorReason::Unspecified => format!("{:?}", self.code),
            reason => reason.as_str_name().trim_start_matches("ERROR_REASON_").to_owned(),
        }
    }
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        let details = status.get_error_details();
        // What the transport says of a connection that broke has no code of its own.
        let is_broken = std::error::Error::source(&status).is_some_and(|source| source.is::<tonic::transport::Error>());
        let info = details.error_info().filter(|info| info.domain == DOMAIN);
        let reason = info.and_then(|info| ErrorReason::from_str_name(&info.reason)).unwrap_or(ErrorReason::Unspecified);
        Self {
            code: if is_broken { Code::Unavailable } else { status.code() },
            message: status.message().to_owned(),
            reason,
            metadata: info.map(|info| info.metadata.clone()).unwrap_or_default(),
            retry_after: details.retry_info().and_then(|retry| retry.retry_delay),
        }
    }
}
