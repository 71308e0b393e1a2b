/**
 * KV-cache event batches: the third frame of PUB, and each payload of Watch. docs/events.md has the layout.
 *
 * Both encodings are read: tagged maps, which engines of today send, and positional arrays. Hashes are 64-bit, signed or
 * unsigned, so they are always bigint here, or bytes: a JavaScript number would round them.
 */
import { Float, Reader } from "./msgpack.js";

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

/** All blocks, of every group, left the tier that the engine calls `medium`. */
export interface TierBlocksCleared {
  type: "TierBlocksCleared";
  medium: string;
  /** Which secondary tier it is about, where the engine says; nobody counts blocks by it, so those of the others go too. */
  ownership: string | null;
}

/**
 * An event of a kind that this version does not know, or that it cannot read. The other events of its batch count all the same. It
 * may have been a removal, unless it calls itself a BlockStored: `Cache.doubtful` says so.
 */
export interface UnknownEvent {
  type: "UnknownEvent";
  name: string;
  /** As it was written, in msgpack. */
  raw: Uint8Array;
}

export type KVEvent = BlockStored | BlockRemoved | AllBlocksCleared | TierBlocksCleared | UnknownEvent;

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
const POSITIONS: Record<string, readonly string[]> = {
  BlockStored: STORED,
  BlockRemoved: REMOVED,
  TierBlocksCleared: ["medium", "ownership"],
};
/** Seconds since 1970 stay below it for three thousand years; what is above is milliseconds. */
const LARGEST_SECONDS = 1e11;

/** Reads one payload. Throws TypeError when it is no batch at all; an event that cannot be read becomes UnknownEvent. */
export function decodeBatch(payload: Uint8Array): EventBatch {
  try {
    return readBatch(new Reader(payload));
  } catch (error) {
    throw new TypeError(`not a batch of KV-cache events, [time, [event, …], rank] was expected: ${String(error)}`);
  }
}

function readBatch(reader: Reader): EventBatch {
  const parts = reader.listHeader();
  const time = reader.value();
  if (parts < 2 || !(time instanceof Float || isInteger(time))) {
    throw new TypeError("no time");
  }
  const ts = time instanceof Float ? time.value : Number(time);
  const events: KVEvent[] = [];
  for (let left = reader.listHeader(); left > 0; left -= 1) {
    events.push(decodeEvent(reader.skip()));
  }
  const rest: Uint8Array[] = [];
  for (let part = 2; part < parts; part += 1) {
    rest.push(reader.skip());
  }
  if (reader.left > 0) {
    throw new TypeError("something is behind it");
  }
  return { ts: ts > LARGEST_SECONDS ? ts / 1000 : ts, events, dataParallelRank: rankOf(rest[0]) };
}

function rankOf(raw: Uint8Array | undefined): number | null {
  try {
    const rank = raw === undefined ? null : new Reader(raw).value();
    return isInteger(rank) ? Number(rank) : null;
  } catch {
    return null;
  }
}

function decodeEvent(raw: Uint8Array): KVEvent {
  let name = "";
  try {
    const value = new Reader(raw).value();
    if (Array.isArray(value)) {
      name = textOr(value[0], "");
      return fromFields(name, byName(name, value.slice(1)));
    }
    if (typeof value === "object" && value !== null) {
      const { type, ...fields } = value as Record<string, unknown>;
      name = textOr(type, "");
      return fromFields(name, fields);
    }
  } catch {
    // What cannot be read costs no other event.
  }
  return { type: "UnknownEvent", name, raw };
}

function byName(name: string, values: unknown[]): Record<string, unknown> {
  const names: readonly string[] = POSITIONS[name] ?? [];
  const needed = name === "BlockStored" ? 4 : names.length > 0 ? 1 : 0;
  if (values.length < needed) {
    throw new TypeError("too few fields");
  }
  if (name === "BlockStored" && (Array.isArray(values[8]) || (values[8] === null && isInteger(values[9])))) {
    // Dynamo has a list of images, or nil in its place, before the group.
    values = [...values.slice(0, 8), ...values.slice(9)];
  }
  const fields: Record<string, unknown> = {};
  for (const [position, field] of names.entries()) {
    const value = values[position];
    if (field === "lora_name" && isRecord(value)) {
      // A map of more fields, as SGLang's array encoding once had it.
      const salt = value["cache_salt"];
      if (typeof salt === "string") {
        fields["cache_salt"] = salt;
      }
    } else if (value !== undefined) {
      fields[field] = value;
    }
  }
  return fields;
}

function fromFields(name: string, fields: Record<string, unknown>): KVEvent {
  if (name === "AllBlocksCleared") {
    return { type: name };
  }
  if (name === "TierBlocksCleared") {
    const { medium, ownership = null } = fields;
    if (!isText(medium) || (ownership !== null && !isText(ownership))) {
      throw new TypeError("a tier that cannot be read");
    }
    return { type: name, medium: String(medium), ownership: ownership === null ? null : String(ownership) };
  }
  if (name === "BlockStored") {
    checkFields(fields, STORED_TYPES);
    const { block_hashes, parent_block_hash, token_ids, block_size, medium, ...more } = fields;
    return {
      type: name,
      blockHashes: hashes(block_hashes),
      parentBlockHash: parent_block_hash == null ? null : hash(parent_block_hash),
      tokenIds: Array.isArray(token_ids) ? token_ids : [],
      blockSize: Number(block_size ?? 0),
      medium: medium == null ? null : String(medium),
      more: plainFields(more),
    };
  }
  if (name === "BlockRemoved") {
    checkFields(fields, REMOVED_TYPES);
    const { block_hashes, medium, ...more } = fields;
    return { type: name, blockHashes: hashes(block_hashes), medium: medium == null ? null : String(medium), more: plainFields(more) };
  }
  throw new TypeError("another event");
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
  if (isInteger(value)) {
    return BigInt(value);
  }
  throw new TypeError("no block hash");
}

type Check = (value: unknown) => boolean;

const isText: Check = (value) => typeof value === "string";
const isListOf = (fits: Check): Check => (value) => Array.isArray(value) && value.every(fits);
/** A cache group is what a uint32 holds. */
const isGroup: Check = (value) => isInteger(value) && value >= 0 && value < 2 ** 32;
const isToken: Check = (value) => isInteger(value) || isText(value) || isListOf(isInteger)(value);

/**
 * What the known fields hold, as docs/events.md has it; each may be nil. An event with anything else in one of them cannot be
 * read: every reader must agree on that, or their states differ.
 */
const STORED_TYPES: Record<string, Check> = {
  parent_block_hash: (value) => isInteger(value) || value instanceof Uint8Array,
  token_ids: isListOf(isToken),
  block_size: isInteger,
  lora_id: isInteger,
  medium: isText,
  lora_name: isText,
  cache_salt: isText,
  extra_keys: Array.isArray,
  group_idx: isGroup,
  kv_cache_spec_kind: isText,
  kv_cache_spec_sliding_window: isInteger,
  locality: isText,
  ownership: isText,
  session_id: isText,
  lookahead_token_ids: isListOf(isListOf(isInteger)),
};
const REMOVED_TYPES: Record<string, Check> = { medium: isText, group_idx: isGroup, locality: isText, ownership: isText };

function checkFields(fields: Record<string, unknown>, types: Record<string, Check>): void {
  for (const [name, fits] of Object.entries(types)) {
    const value = fields[name];
    if (value != null && !fits(value)) {
      throw new TypeError(`${name} cannot be read`);
    }
  }
}

function isInteger(value: unknown): value is number | bigint {
  return typeof value === "number" || typeof value === "bigint";
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && Object.getPrototypeOf(value) === Object.prototype;
}

function textOr(value: unknown, otherwise: string): string {
  return typeof value === "string" ? value : otherwise;
}

function plainFields(fields: Record<string, unknown>): Record<string, unknown> {
  return Object.fromEntries(Object.entries(fields).flatMap(([name, value]) => (value == null ? [] : [[name, plain(value)]])));
}

function plain(value: unknown): unknown {
  if (value instanceof Float) {
    return value.value;
  }
  if (Array.isArray(value)) {
    return value.map(plain);
  }
  return isRecord(value) ? plainFields(value) : value;
}
