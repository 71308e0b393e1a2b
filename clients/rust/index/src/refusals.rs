//! What the server refuses, with the reason and metadata that docs/errors.md lists.

use kvgrpc::pb::ErrorReason;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

pub const DOMAIN: &str = "kvgrpc.dev";

pub fn refused<const N: usize>(code: Code, reason: ErrorReason, text: String, metadata: [(&str, String); N]) -> Status {
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value));
    Status::with_error_details(code, text, ErrorDetails::with_error_info(reason.as_str_name(), DOMAIN, metadata))
}

/// `field` must be what `rule` says, and is `value`.
pub fn invalid(field: &str, value: &str, rule: &str) -> Status {
    let text = format!("{field}: must be {rule}, not {value}");
    let metadata = [("field", field.to_owned()), ("value", value.to_owned()), ("rule", rule.to_owned())];
    refused(Code::InvalidArgument, ErrorReason::InvalidRequest, text, metadata)
}

/// What only the index in Python does.
pub fn disabled(feature: &str, instead: &str) -> Status {
    let text = format!("{feature} is not in the native index: {instead}");
    let metadata = [("feature", feature.to_owned()), ("howToEnable", instead.to_owned())];
    refused(Code::Unimplemented, ErrorReason::FeatureDisabled, text, metadata)
}

pub fn draining() -> Status {
    let text = "this index stops: ask another one".to_owned();
    refused(Code::Unavailable, ErrorReason::ServerDraining, text, [])
}

/// The caller is known, and may not.
pub fn denied(method: &str, role: &str, allowed: &str) -> Status {
    let text = format!("{method} is for {allowed}s, and not for {role}s");
    let metadata = [("method", method.to_owned()), ("role", role.to_owned()), ("allowed", allowed.to_owned())];
    refused(Code::PermissionDenied, ErrorReason::PermissionDenied, text, metadata)
}
