//! Batches of KV-cache events as typed values, of every encoding and dialect (docs/events.md).

use std::collections::BTreeMap;

use crate::fields::{by_name, fit, Fields};
use crate::msgpack::{big_endian, decode, Malformed, Reader, Value};
use crate::pb;

/// What is above are milliseconds: as seconds they would lie in the year 5138 or later.
const LATEST_SECONDS: f64 = 1e11;

/// A payload is no batch of KV-cache events at all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a batch of KV-cache events: [time, [event, ...], rank] was expected")]
pub struct NotABatch;

impl From<Malformed> for NotABatch {
    fn from(_: Malformed) -> Self {
        Self
    }
}

/// One payload of PUB, or of a Watch.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Unix seconds of the publisher, for people: order comes from the sequence.
    pub time: f64,
    /// What happened, in order.
    pub events: Vec<Event>,
    /// None where the writer named none.
    pub rank: Option<i64>,
}

/// Something that happened to blocks of a cache.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Blocks came into a tier.
    BlockStored(BlockStored),
    /// One copy of each block left a tier.
    BlockRemoved(BlockRemoved),
    /// Nothing is cached any more, in any tier.
    AllBlocksCleared,
    /// All blocks, of every group, left the tier that the engine calls `medium`. `ownership` names a secondary tier, where the
    /// engine does; nobody counts blocks by it, so those of the others go too.
    TierBlocksCleared {
        /// The tier.
        medium: String,
        /// Empty: not said.
        ownership: String,
    },
    /// An event of a kind that this version does not know, or that it cannot read. The other events of its batch count all the
    /// same. It may have been a removal, unless it calls itself a BlockStored: `Cache::doubtful` says so.
    Unknown {
        /// As it calls itself; empty: it does not.
        name: String,
        /// As it was written, in msgpack.
        raw: Vec<u8>,
    },
}

/// Blocks came into a tier, each the child of the one before it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BlockStored {
    /// The blocks.
    pub hashes: Vec<BlockHash>,
    /// The block before the first; None: there is none.
    pub parent: Option<BlockHash>,
    /// Those of all blocks, `block_size` each: numbers, or pairs of them where the engine drafts by bigrams.
    pub token_ids: Vec<Value>,
    /// Tokens in a block; 0: not said.
    pub block_size: i64,
    /// The engine's name of the tier ("GPU", "CPU_PINNED", ...); empty: the device's.
    pub medium: String,
    /// The cache group; 0 where the engine has one.
    pub group: u32,
    /// What else it said, by its name on the wire: lora_name, extra_keys, cache_salt, ...
    pub more: BTreeMap<String, Value>,
}

/// One copy of each block left a tier.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BlockRemoved {
    /// The blocks.
    pub hashes: Vec<BlockHash>,
    /// As of BlockStored.
    pub medium: String,
    /// As of BlockStored.
    pub group: u32,
    /// As of BlockStored.
    pub more: BTreeMap<String, Value>,
}

/// What names a block: opaque.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum BlockHash {
    /// 64 bits; signed and unsigned numbers are the same.
    Value(u64),
    /// A digest.
    Digest(Vec<u8>),
}

impl BlockHash {
    /// Identifies a block in 64 bits: of a digest the last 8 bytes count.
    pub fn key(&self) -> u64 {
        match self {
            Self::Value(value) => *value,
            Self::Digest(digest) => big_endian(&digest[digest.len().saturating_sub(8)..]),
        }
    }

    pub(crate) fn read(value: &Value) -> Option<Self> {
        match value {
            Value::Int(number) => Some(Self::Value(*number as u64)),
            Value::Uint(number) => Some(Self::Value(*number)),
            Value::Bytes(digest) => Some(Self::Digest(digest.clone())),
            _ => None,
        }
    }
}

/// Reads a payload in any encoding and dialect. An event that cannot be read is `Unknown`.
pub fn decode_batch(payload: &[u8]) -> Result<Batch, NotABatch> {
    let mut reader = Reader::new(payload);
    let parts = reader.list_header()?;
    if parts < 2 {
        return Err(NotABatch);
    }
    let mut time = match reader.value(0)? {
        Value::Float(seconds) => seconds,
        Value::Int(seconds) => seconds as f64,
        Value::Uint(seconds) => seconds as f64,
        _ => return Err(NotABatch),
    };
    if time > LATEST_SECONDS {
        time /= 1000.0;
    }
    let mut events = Vec::new();
    for _ in 0..reader.list_header()? {
        events.push(decode_event(reader.skip()?));
    }
    let mut rank = None;
    for part in 2..parts {
        let raw = reader.skip()?;
        if let (2, Ok(Value::Int(number))) = (part, decode(raw)) {
            rank = Some(number);
        }
    }
    if reader.rest.is_empty() {
        Ok(Batch { time, events, rank })
    } else {
        Err(NotABatch)
    }
}

fn decode_event(raw: &[u8]) -> Event {
    let (name, fields) = match decode(raw) {
        Ok(Value::List(mut values)) if !values.is_empty() => match values.remove(0) {
            Value::Text(name) => {
                let fields = by_name(&name, values);
                (name, fields)
            }
            _ => (String::new(), None),
        },
        Ok(Value::Map(mut fields)) => match fields.remove("type") {
            Some(Value::Text(name)) => (name, Some(fields)),
            _ => (String::new(), None),
        },
        _ => (String::new(), None),
    };
    fields.and_then(|fields| from_fields(&name, fields)).unwrap_or_else(|| Event::Unknown { name, raw: raw.to_vec() })
}

fn from_fields(name: &str, mut fields: Fields) -> Option<Event> {
    match name {
        "AllBlocksCleared" => return Some(Event::AllBlocksCleared),
        "TierBlocksCleared" => return tier_cleared(fields),
        "BlockStored" | "BlockRemoved" => {}
        _ => return None,
    }
    let Some(Value::List(listed)) = fields.remove("block_hashes") else { return None };
    if !fit(&fields, name == "BlockStored") {
        return None;
    }
    let hashes = listed.iter().map(BlockHash::read).collect::<Option<Vec<_>>>()?;
    fields.retain(|_, value| *value != Value::Nil);
    let medium = text(fields.remove("medium"));
    let group = integer(fields.remove("group_idx")) as u32;
    if name == "BlockRemoved" {
        return Some(Event::BlockRemoved(BlockRemoved { hashes, medium, group, more: fields }));
    }
    let parent = fields.remove("parent_block_hash").as_ref().and_then(BlockHash::read);
    let token_ids = match fields.remove("token_ids") {
        Some(Value::List(tokens)) => tokens,
        _ => Vec::new(),
    };
    let block_size = integer(fields.remove("block_size"));
    Some(Event::BlockStored(BlockStored { hashes, parent, token_ids, block_size, medium, group, more: fields }))
}

fn tier_cleared(mut fields: Fields) -> Option<Event> {
    let Some(Value::Text(medium)) = fields.remove("medium") else { return None };
    match fields.remove("ownership") {
        None | Some(Value::Nil) => Some(Event::TierBlocksCleared { medium, ownership: String::new() }),
        Some(Value::Text(ownership)) => Some(Event::TierBlocksCleared { medium, ownership }),
        Some(_) => None,
    }
}

fn text(value: Option<Value>) -> String {
    match value {
        Some(Value::Text(text)) => text,
        _ => String::new(),
    }
}

fn integer(value: Option<Value>) -> i64 {
    match value {
        Some(Value::Int(number)) => number,
        _ => 0,
    }
}

/// Events of a Watch in messages; what a server could not read is read here, where this version can.
impl From<pb::KvEventBatch> for Batch {
    fn from(batch: pb::KvEventBatch) -> Self {
        Self { time: batch.unix_seconds, events: batch.events.into_iter().map(Event::from).collect(), rank: None }
    }
}

impl From<pb::KvEvent> for Event {
    fn from(event: pb::KvEvent) -> Self {
        use pb::kv_event::Kind;
        match event.kind {
            Some(Kind::Stored(stored)) => Self::BlockStored(stored.into()),
            Some(Kind::Removed(removed)) => Self::BlockRemoved(BlockRemoved {
                hashes: removed.block_hashes.into_iter().map(BlockHash::from).collect(),
                medium: removed.medium,
                group: removed.group,
                more: BTreeMap::new(),
            }),
            Some(Kind::Cleared(cleared)) if cleared.scope() == pb::ClearScope::Medium => {
                Self::TierBlocksCleared { medium: cleared.medium, ownership: cleared.ownership }
            }
            Some(Kind::Cleared(_)) => Self::AllBlocksCleared,
            Some(Kind::Unknown(raw)) => decode_event(&raw),
            None => Self::Unknown { name: String::new(), raw: Vec::new() },
        }
    }
}

impl From<pb::BlocksStored> for BlockStored {
    fn from(stored: pb::BlocksStored) -> Self {
        let mut more = BTreeMap::new();
        let texts = [
            ("lora_name", stored.lora_name),
            ("cache_salt", stored.cache_salt),
            ("kv_cache_spec_kind", stored.cache_kind),
            ("session_id", stored.session_id),
            ("locality", stored.locality),
            ("ownership", stored.ownership),
        ];
        for (name, text) in texts.into_iter().filter(|(_, text)| !text.is_empty()) {
            more.insert(name.to_owned(), Value::Text(text));
        }
        let window = stored.sliding_window.map(i64::from);
        for (name, number) in [("lora_id", stored.lora_id), ("kv_cache_spec_sliding_window", window)] {
            if let Some(number) = number {
                more.insert(name.to_owned(), Value::Int(number));
            }
        }
        Self {
            hashes: stored.block_hashes.into_iter().map(BlockHash::from).collect(),
            parent: stored.parent_block_hash.map(BlockHash::from),
            token_ids: stored.token_ids.into_iter().map(|token| Value::Int(i64::from(token))).collect(),
            block_size: i64::from(stored.page_tokens),
            medium: stored.medium,
            group: stored.group,
            more,
        }
    }
}

impl From<pb::BlockHash> for BlockHash {
    fn from(hash: pb::BlockHash) -> Self {
        match hash.kind {
            Some(pb::block_hash::Kind::Digest(digest)) => Self::Digest(digest),
            Some(pb::block_hash::Kind::Value(value)) => Self::Value(value),
            None => Self::Value(0),
        }
    }
}
