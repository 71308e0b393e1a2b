//! Payloads read as their cases say.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::{golden, golden_bytes, hex, unhex};
use crate::{decode_batch, Batch, BlockHash, Event, NotABatch, Value};

#[test]
fn golden_batches_read_as_their_cases() {
    let cases = golden("cases.json");
    assert!(cases.as_object().unwrap().len() > 30);
    for (name, case) in cases.as_object().unwrap() {
        let batch = decode_batch(&golden_bytes(&format!("{name}.msgpack"))).unwrap();
        assert_eq!(batch.time, case["ts"].as_f64().unwrap(), "{name}");
        assert_eq!(batch.rank, case["rank"].as_i64(), "{name}");
        let expected: Vec<_> = case["events"].as_array().unwrap().iter().map(comparable).collect();
        let read: Vec<_> = batch.events.iter().map(as_case).collect();
        assert_eq!(read, expected, "{name}");
    }
}

#[test]
fn hostile_payloads_are_read_as_the_publisher_reads_them() {
    let cases = golden("hostile.json");
    assert!(cases.as_object().unwrap().len() >= 100);
    for (name, case) in cases.as_object().unwrap() {
        let mut payload = Vec::new();
        for part in case["parts"].as_array().unwrap() {
            payload.extend(unhex(part[0].as_str().unwrap()).repeat(part[1].as_u64().unwrap() as usize));
        }
        let read = decode_batch(&payload);
        match case["events"].as_array() {
            None => assert_eq!(read, Err(NotABatch), "{name}"),
            Some(kinds) => assert_eq!(kinds_of(&read.unwrap()), *kinds, "{name}"),
        }
    }
}

#[test]
fn events_in_messages_are_those_of_the_payload() {
    use crate::pb::{self, block_hash, kv_event::Kind};
    let hash = |value| pb::BlockHash { kind: Some(block_hash::Kind::Value(value)) };
    let cleared =
        pb::BlocksCleared { scope: pb::ClearScope::Medium.into(), medium: "DISK".into(), ..Default::default() };
    let kinds = [
        Kind::Stored(pb::BlocksStored { block_hashes: vec![hash(1)], page_tokens: 16, group: 2, ..Default::default() }),
        Kind::Removed(pb::BlocksRemoved { block_hashes: vec![hash(1)], ..Default::default() }),
        Kind::Cleared(cleared),
        Kind::Cleared(pb::BlocksCleared { scope: 99, ..Default::default() }),
        Kind::Unknown(vec![0x91, 0xa1, b'x']),
    ];
    let events =
        kinds.into_iter().map(|kind| pb::KvEvent { kind: Some(kind) }).chain([pb::KvEvent::default()]).collect();
    let batch = Batch::from(pb::KvEventBatch { unix_seconds: 1.0, events });
    let expected =
        ["BlockStored", "BlockRemoved", "TierBlocksCleared", "AllBlocksCleared", "UnknownEvent", "UnknownEvent"];
    assert_eq!(kinds_of(&batch), expected);
    assert!(matches!(&batch.events[0], Event::BlockStored(stored) if stored.block_size == 16 && stored.group == 2));
    assert!(matches!(&batch.events[4], Event::Unknown { name, .. } if name == "x"));
}

fn kinds_of(batch: &Batch) -> Vec<&'static str> {
    batch.events.iter().map(kind_of).collect()
}

fn kind_of(event: &Event) -> &'static str {
    match event {
        Event::BlockStored(_) => "BlockStored",
        Event::BlockRemoved(_) => "BlockRemoved",
        Event::AllBlocksCleared => "AllBlocksCleared",
        Event::TierBlocksCleared { .. } => "TierBlocksCleared",
        Event::Unknown { .. } => "UnknownEvent",
    }
}

type Flat = BTreeMap<String, Json>;

/// An event in the words of cases.json.
fn as_case(event: &Event) -> Flat {
    let mut flat = Flat::from([("type".to_owned(), Json::from(kind_of(event)))]);
    let mut say = |key: &str, value: Json| drop(flat.insert(key.to_owned(), value));
    let (hashes, medium, group, more) = match event {
        Event::AllBlocksCleared => return flat,
        Event::TierBlocksCleared { medium, .. } => {
            say("medium", medium.as_str().into());
            return flat;
        }
        Event::Unknown { name, .. } => {
            say("name", name.as_str().into());
            return flat;
        }
        Event::BlockStored(stored) => {
            say("token_ids", stored.token_ids.iter().map(plain).collect());
            say("block_size", stored.block_size.to_string().into());
            if let Some(parent) = &stored.parent {
                say("parent_block_hash", hash_text(parent));
            }
            (&stored.hashes, &stored.medium, stored.group, &stored.more)
        }
        Event::BlockRemoved(removed) => (&removed.hashes, &removed.medium, removed.group, &removed.more),
    };
    say("block_hashes", hashes.iter().map(hash_text).collect());
    if !medium.is_empty() {
        say("medium", medium.as_str().into());
    }
    if group != 0 {
        say("group_idx", group.to_string().into());
    }
    for (key, value) in more {
        say(key, plain(value));
    }
    flat
}

fn hash_text(hash: &BlockHash) -> Json {
    match hash {
        BlockHash::Value(value) => value.to_string().into(),
        BlockHash::Digest(digest) => format!("hex:{}", hex(digest)).into(),
    }
}

fn plain(value: &Value) -> Json {
    match value {
        Value::Nil => Json::Null,
        Value::Bool(is) => is.to_string().into(),
        Value::Int(number) => number.to_string().into(),
        Value::Uint(number) => number.to_string().into(),
        Value::Float(number) => number.to_string().into(),
        Value::Text(text) => text.as_str().into(),
        Value::Bytes(bytes) => format!("hex:{}", hex(bytes)).into(),
        Value::List(values) => values.iter().map(plain).collect(),
        Value::Map(fields) => fields.iter().map(|(key, value)| (key.clone(), plain(value))).collect(),
        Value::Strange => "strange".into(),
    }
}

/// Without absent fields, with all numbers as text (hashes as unsigned), unknown keys beside the known ones.
fn comparable(event: &Json) -> Flat {
    let mut flat = Flat::new();
    for (key, value) in event.as_object().unwrap() {
        match (key.as_str(), value) {
            (_, Json::Null) | ("raw", _) => {}
            ("group_idx", group) if group.as_u64() == Some(0) => {}
            ("unknown_keys", Json::Object(unknown)) => {
                let present = unknown.iter().filter(|(_, value)| !value.is_null());
                flat.extend(present.map(|(key, value)| (key.clone(), in_text(value, false))));
            }
            ("block_hashes" | "parent_block_hash", hashes) => drop(flat.insert(key.clone(), in_text(hashes, true))),
            _ => drop(flat.insert(key.clone(), in_text(value, false))),
        }
    }
    flat
}

fn in_text(value: &Json, unsigned: bool) -> Json {
    match value {
        Json::Array(values) => values.iter().map(|value| in_text(value, unsigned)).collect(),
        Json::Object(fields) => fields.iter().map(|(key, value)| (key.clone(), in_text(value, unsigned))).collect(),
        Json::Number(number) if unsigned => match number.as_i64() {
            Some(signed) => (signed as u64).to_string().into(),
            None => number.to_string().into(),
        },
        Json::Null => Json::Null,
        Json::String(text) => text.as_str().into(),
        other => other.to_string().into(),
    }
}
