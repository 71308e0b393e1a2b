//! What the known fields of events hold (docs/events.md): every reader must agree, or their states differ.

use std::collections::BTreeMap;

use crate::batch::BlockHash;
use crate::msgpack::Value;

pub(crate) type Fields = BTreeMap<String, Value>;

// Names of the fields of arrays behind the event's name, oldest first; absent ones at the end are left out.
const STORED: [&str; 12] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
];
const REMOVED: [&str; 4] = ["block_hashes", "medium", "group_idx", "locality"];
const TIER_CLEARED: [&str; 2] = ["medium", "ownership"];

/// The fields of an event that was written as an array, by their names; None: some that it must have are missing.
pub(crate) fn by_name(name: &str, mut values: Vec<Value>) -> Option<Fields> {
    let (names, needed): (&[&str], usize) = match name {
        "BlockStored" => (&STORED, 4),
        "BlockRemoved" => (&REMOVED, 1),
        "TierBlocksCleared" => (&TIER_CLEARED, 1),
        _ => (&[], 0),
    };
    if values.len() < needed {
        return None;
    }
    if name == "BlockStored" && has_images(&values) {
        values.remove(8);
    }
    let mut fields = Fields::new();
    for (name, value) in names.iter().zip(values) {
        // SGLang's arrays once had a map of more fields where vLLM's have the name of the adapter.
        match value {
            Value::Map(mut metadata) if *name == "lora_name" => {
                if let Some(salt @ Value::Text(_)) = metadata.remove("cache_salt") {
                    fields.insert("cache_salt".to_owned(), salt);
                }
            }
            value => drop(fields.insert((*name).to_owned(), value)),
        }
    }
    Some(fields)
}

/// Dynamo has a list of images, or nil in its place, before the group.
fn has_images(values: &[Value]) -> bool {
    match values.get(8) {
        Some(Value::List(_)) => true,
        Some(Value::Nil) => values.get(9).is_some_and(is_integer),
        _ => false,
    }
}

/// Whether each known field that is there can be read.
pub(crate) fn fit(fields: &Fields, is_stored: bool) -> bool {
    fields.iter().all(|(name, value)| *value == Value::Nil || fits(name, value, is_stored))
}

fn fits(name: &str, value: &Value, is_stored: bool) -> bool {
    match name {
        "medium" | "locality" | "ownership" => is_text(value),
        "group_idx" => is_group(value),
        _ if !is_stored => true,
        "parent_block_hash" => BlockHash::read(value).is_some(),
        "token_ids" => is_list_of(value, is_token),
        "block_size" | "lora_id" | "kv_cache_spec_sliding_window" => is_integer(value),
        "lora_name" | "cache_salt" | "kv_cache_spec_kind" | "session_id" => is_text(value),
        "extra_keys" => matches!(value, Value::List(_)),
        "lookahead_token_ids" => is_list_of(value, |one| is_list_of(one, is_integer)),
        _ => true,
    }
}

fn is_text(value: &Value) -> bool {
    matches!(value, Value::Text(_))
}

fn is_integer(value: &Value) -> bool {
    matches!(value, Value::Int(_) | Value::Uint(_))
}

/// A cache group is what a uint32 holds.
fn is_group(value: &Value) -> bool {
    matches!(value, Value::Int(number) if u32::try_from(*number).is_ok())
}

fn is_token(value: &Value) -> bool {
    is_integer(value) || is_text(value) || is_list_of(value, is_integer)
}

fn is_list_of(value: &Value, fits: impl Fn(&Value) -> bool) -> bool {
    matches!(value, Value::List(values) if values.iter().all(fits))
}
