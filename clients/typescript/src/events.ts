/**
 * KV-cache event batches: the third frame of PUB, and each payload of Watch. docs/events.md has the layout.
 *
 * Both encodings are read: tagged maps, which engines of today send, and positional arrays. Hashes are 64-bit, signed or
 * unsigned, so they are always bigint here, or bytes: a JavaScript number would round them.
 */
import { decode } from "@msgpack/msgpack";

export type BlockHash = bigint | Uint8Array;

export interface BlockStored {
  type: "BlockStored";
  blockHashes: BlockHash[];
  /** The block before the first; null: there is none. */
  parentBlockHash: BlockHash | null;
  /** Of all blocks, blockSize each; pairs of numbers where the engine drafts by bigrams. */
  tokenIds: unknown[];
  blockSize: number;
  /** The tier ("GPU", "CPU_PINNED", …); null: the device's. */
  medium: string | null;
  /** What else the event said, by its name on the wire: lora_name, extra_keys, group_idx, cache_salt, … */
  more: Record<string, unknown>;
}

export interface BlockRemoved {
  type: "BlockRemoved";
  blockHashes: BlockHash[];
  medium: string | null;
  more: Record<string, unknown>;
}

export interface AllBlocksCleared {
  type: "AllBlocksCleared";
}

/** An event of a kind that this version does not know. The other events of its batch count all the same. */
export interface UnknownEvent {
  type: "UnknownEvent";
  name: string;
  value: unknown;
}

export type KVEvent = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent;

export interface EventBatch {
  /** Unix seconds of the publisher, for people: order comes from the sequence. */
  ts: number;
  events: KVEvent[];
  dataParallelRank: number | null;
}

/** Names of the positional fields behind the event's name, oldest first; absent ones at the end are left out. */
const STORED = [
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
] as const;
const REMOVED = ["block_hashes", "medium", "group_idx", "locality"] as const;
/** Seconds since 1970 stay below it for three thousand years; what is above is milliseconds. */
const LARGEST_SECONDS = 1e11;

/** Reads one payload. Throws TypeError when it is no batch at all; an event that cannot be read becomes UnknownEvent. */
export function decodeBatch(payload: Uint8Array): EventBatch {
  let batch: unknown;
  try {
    batch = decode(payload, { useBigInt64: true });
  } catch (error) {
    throw new TypeError(`not a batch of KV-cache events: ${String(error)}`);
  }
  if (!Array.isArray(batch) || batch.length < 2 || !Array.isArray(batch[1])) {
    throw new TypeError("not a batch of KV-cache events: [ts, [event, …], rank] was expected");
  }
  const ts = Number(batch[0]);
  return {
    ts: ts > LARGEST_SECONDS ? ts / 1000 : ts,
    events: batch[1].map(decodeEvent),
    dataParallelRank: batch[2] == null ? null : Number(batch[2]),
  };
}

function decodeEvent(raw: unknown): KVEvent {
  try {
    if (Array.isArray(raw)) {
      return fromFields(String(raw[0]), byName(String(raw[0]), raw.slice(1)), raw);
    }
    if (typeof raw === "object" && raw !== null) {
      const { type, ...fields } = raw as Record<string, unknown>;
      return fromFields(String(type), fields, raw);
    }
  } catch {
    // Falls through: what cannot be read is shown, and costs no other event.
  }
  return { type: "UnknownEvent", name: "", value: raw };
}

function byName(type: string, values: unknown[]): Record<string, unknown> {
  const names: readonly string[] = type === "BlockStored" ? STORED : type === "BlockRemoved" ? REMOVED : [];
  const fields: Record<string, unknown> = {};
  for (const [position, name] of names.entries()) {
    const value = values[position];
    if (name === "lora_name" && isRecord(value)) {
      Object.assign(fields, value); // a map of extra fields, as SGLang's array encoding once had it
    } else if (value !== undefined) {
      fields[name] = value;
    }
  }
  return fields;
}

function fromFields(type: string, fields: Record<string, unknown>, raw: unknown): KVEvent {
  if (type === "AllBlocksCleared") {
    return { type };
  }
  if (type === "BlockStored") {
    const { block_hashes, parent_block_hash, token_ids, block_size, medium, ...more } = fields;
    return {
      type,
      blockHashes: hashes(block_hashes),
      parentBlockHash: parent_block_hash == null ? null : hash(parent_block_hash),
      tokenIds: Array.isArray(token_ids) ? token_ids : [],
      blockSize: Number(block_size ?? 0),
      medium: medium == null ? null : String(medium),
      more: withoutNulls(more),
    };
  }
  if (type === "BlockRemoved") {
    const { block_hashes, medium, ...more } = fields;
    return { type, blockHashes: hashes(block_hashes), medium: medium == null ? null : String(medium), more: withoutNulls(more) };
  }
  return { type: "UnknownEvent", name: type, value: raw };
}

function hashes(value: unknown): BlockHash[] {
  if (!Array.isArray(value)) {
    throw new TypeError("block_hashes is no list");
  }
  return value.map(hash);
}

/** msgpack's small integers arrive as numbers, 64-bit ones as bigint: the same hash must not be two different keys. */
function hash(value: unknown): BlockHash {
  if (value instanceof Uint8Array) {
    return value;
  }
  if (typeof value === "bigint" || Number.isInteger(value)) {
    return BigInt(value as bigint | number);
  }
  throw new TypeError(`${String(value)} is no block hash`);
}

function withoutNulls(fields: Record<string, unknown>): Record<string, unknown> {
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value != null));
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Uint8Array);
}
