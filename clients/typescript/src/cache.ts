/** What one cache holds by what its events said, and whether that is what its publisher has. */
import type { BlockHash, KVEvent } from "./events.js";
import { DigestKind, type StateDigest } from "./gen/kvgrpc/v1/event_service_pb.js";
import type { WatchItem } from "./items.js";

export type Verdict =
  /** No digest, or one of a moment that is not kept any more, or the cache was not seen from its beginning. */
  | "unknown"
  | "equal"
  /** Something is lost, here or there: begin again with a snapshot. */
  | "different";

interface Tier {
  readonly medium: string;
  readonly group: number;
  readonly copies: Map<bigint, number>;
  mixed: bigint;
}

const BITS = 64;
/**
 * A cache holds blocks in so many tiers and groups at most, whose names have so many bytes at most; what names another one is
 * passed over, by every reader.
 */
const MAX_PLACES = 1024;
const MAX_MEDIUM_BYTES = 128;
/** Under load a publisher's digest is older than what its readers have by then: both keep those of multiples of this. */
const CHECKPOINT_BATCHES = 64n;
const CHECKPOINTS = 64n;

/**
 * Give it every item of a watch, in order. A block that is stored twice is there until it is removed twice; what is removed
 * and was not there changes nothing. What a snapshot says is shown once it is complete and comes to its own digest; until then
 * what was known before it is.
 */
export class Cache {
  #tiers = new Map<string, Tier>();
  #past = new Map<bigint, string>();
  #next = 0n;
  #whole = true;
  #log = "";
  /** The last batch with which something may have been removed that cannot be read here. */
  #doubtAt: bigint | undefined;
  /** What a snapshot has said so far. */
  #shadow: Cache | undefined;

  /** Takes an item, and compares where it brings the publisher's digest. */
  hear(item: WatchItem): Verdict {
    switch (item.kind) {
      case "begin":
        if (item.fresh) {
          this.#begin(item.sequence === 0n);
        }
        this.#log = item.log;
        break;
      case "snapshot":
        return this.#hearPart(item);
      case "batch":
        this.apply(item.batch.events);
        this.#advance(item.sequence + 1n);
        break;
      case "void":
        this.forget();
        break;
      case "unreadable":
        if (this.#shadow === undefined) {
          // What it said is lost: this is no state of the cache until something clears it.
          this.forget();
        }
        this.#shadow = undefined;
        break;
      case "current":
        return this.compare(item.state);
      case "dropped":
    }
    return "unknown";
  }

  /** Takes the events of one batch, in order. */
  apply(events: readonly KVEvent[]): void {
    for (const event of events) {
      if (event.type === "BlockStored") {
        this.#store(event.medium, event.more["group_idx"], event.blockHashes);
      } else if (event.type === "BlockRemoved") {
        this.#remove(nameOf(mediumKey(event.medium), Number(event.more["group_idx"] ?? 0)), event.blockHashes);
      } else if (event.type === "AllBlocksCleared") {
        this.#tiers.clear();
        this.#whole = true;
        this.#doubtAt = undefined;
      } else if (event.type === "TierBlocksCleared") {
        const medium = mediumKey(event.medium);
        for (const [name, tier] of this.#tiers) {
          if (tier.medium === medium) {
            this.#tiers.delete(name);
          }
        }
      } else if (event.name !== "BlockStored") {
        this.#doubtAt = this.#next;
      }
    }
  }

  /** Whether a block is in a tier ("GPU", "CPU_PINNED", …) and group. */
  holds(hash: BlockHash, medium = "GPU", group = 0): boolean {
    return this.#tiers.get(nameOf(mediumKey(medium), group))?.copies.has(keyOf(hash)) ?? false;
  }

  /**
   * An event that cannot be read here may have been a removal: blocks that it shows may be gone. It ends with a digest or snapshot of
   * a publisher that can read it, or when everything is cleared.
   */
  get doubtful(): boolean {
    return this.#doubtAt !== undefined;
  }

  /**
   * Whether it shows all that the cache held at some moment: not where it is doubtful, and not where the log began before what could be
   * read, no snapshot is served, and nothing was cleared since (then there may be more blocks, never fewer).
   */
  get whole(): boolean {
    return this.#whole && !this.doubtful;
  }

  /** Empties it: what it held is no state of its publisher's. It compares with nothing until it is whole again. */
  forget(): void {
    this.#begin(false);
  }

  /** How many different blocks each tier and group holds, of those that have any. */
  blocks(): { medium: string; group: number; blocks: number }[] {
    return this.#inOrder().map(({ medium, group, copies }) => ({ medium, group, blocks: copies.size }));
  }

  /** Of each tier and group that has blocks: how many, and the sum of their mixed hashes, as docs/events.md has it. */
  digest(): { medium: string; group: number; blocks: number; mixedHashes: bigint }[] {
    return this.#inOrder().map(({ medium, group, copies, mixed }) => {
      return { medium, group, blocks: copies.size, mixedHashes: mixed };
    });
  }

  /** Whether this was what it held at the moment of a publisher's digest: that of now, or of one of the last checkpoints. */
  compare(state: StateDigest | undefined): Verdict {
    if (state === undefined || !this.#whole || state.kind > DigestKind.MIX64_SUM) {
      return "unknown";
    }
    const moment = BigInt(state.nextSequence);
    const own = moment === this.#next ? this.#digest() : this.#past.get(moment);
    if (own === undefined) {
      return "unknown";
    }
    if (own !== textOf(state.tiers)) {
      // A doubtful one counts blocks that may be gone, by an event that was read here.
      return state.doubtful && this.#doubtAt === undefined ? "unknown" : "different";
    }
    if (!state.doubtful && this.#doubtAt !== undefined && this.#doubtAt < moment) {
      // Its publisher can read what came before, and the blocks are these.
      this.#doubtAt = undefined;
    }
    return "equal";
  }

  #hearPart(part: Extract<WatchItem, { kind: "snapshot" }>): Verdict {
    if (part.index === 0) {
      if (part.log !== this.#log) {
        this.forget();
        this.#log = part.log;
      }
      this.#shadow = new Cache();
    }
    const shadow = this.#shadow;
    shadow?.apply(part.events);
    if (shadow === undefined || !part.last) {
      return "unknown";
    }
    this.#shadow = undefined;
    shadow.#advance(part.nextSequence);
    const verdict = shadow.compare(part.state);
    if (verdict !== "different") {
      [this.#tiers, this.#past, this.#next, this.#whole] = [shadow.#tiers, shadow.#past, shadow.#next, true];
      // Its publisher may not be able to read what came either.
      this.#doubtAt = part.state?.doubtful ? part.nextSequence : shadow.#doubtAt;
    }
    return verdict;
  }

  #begin(whole: boolean): void {
    this.#shadow = undefined;
    this.#tiers.clear();
    this.#past.clear();
    this.#next = 0n;
    this.#whole = whole;
    this.#doubtAt = undefined;
  }

  #advance(next: bigint): void {
    this.#next = next;
    if (next % CHECKPOINT_BATCHES !== 0n || !this.#whole) {
      return;
    }
    this.#past.set(next, this.#digest());
    // In the order in which they came, so the first is the oldest; holes of dropped batches may step over one.
    for (const old of this.#past.keys()) {
      if (old + CHECKPOINTS * CHECKPOINT_BATCHES > next) {
        break;
      }
      this.#past.delete(old);
    }
  }

  #store(named: string | null, group: unknown, hashes: readonly BlockHash[]): void {
    const medium = mediumKey(named);
    const number = Number(group ?? 0);
    const name = nameOf(medium, number);
    let tier = this.#tiers.get(name);
    if (tier === undefined) {
      if (hashes.length === 0 || this.#tiers.size >= MAX_PLACES || Buffer.byteLength(medium) > MAX_MEDIUM_BYTES) {
        return;
      }
      tier = { medium, group: number, copies: new Map(), mixed: 0n };
      this.#tiers.set(name, tier);
    }
    for (const key of hashes.map(keyOf)) {
      tier.copies.set(key, (tier.copies.get(key) ?? 0) + 1);
      tier.mixed = BigInt.asUintN(BITS, tier.mixed + mix(key));
    }
  }

  #remove(name: string, hashes: readonly BlockHash[]): void {
    const tier = this.#tiers.get(name);
    if (tier === undefined) {
      return;
    }
    for (const key of hashes.map(keyOf)) {
      const count = tier.copies.get(key);
      if (count === undefined) {
        continue;
      }
      if (count === 1) {
        tier.copies.delete(key);
      } else {
        tier.copies.set(key, count - 1);
      }
      tier.mixed = BigInt.asUintN(BITS, tier.mixed - mix(key));
    }
    if (tier.copies.size === 0) {
      this.#tiers.delete(name);
    }
  }

  #inOrder(): Tier[] {
    return [...this.#tiers.values()].sort((a, b) => compareText(a.medium, b.medium) || a.group - b.group);
  }

  #digest(): string {
    return textOf(this.digest());
  }
}

/** The 64 bits that identify a block: signed and unsigned numbers are the same, of a digest the last 8 bytes count. */
export function keyOf(hash: BlockHash): bigint {
  if (typeof hash === "bigint") {
    return BigInt.asUintN(BITS, hash);
  }
  return hash.subarray(-8).reduce((key, byte) => (key << 8n) | BigInt(byte), 0n);
}

/** The finalizer of splitmix64, as docs/events.md has it. */
function mix(key: bigint): bigint {
  let value = BigInt.asUintN(BITS, key + 0x9e3779b97f4a7c15n);
  value = BigInt.asUintN(BITS, (value ^ (value >> 30n)) * 0xbf58476d1ce4e5b9n);
  value = BigInt.asUintN(BITS, (value ^ (value >> 27n)) * 0x94d049bb133111ebn);
  return value ^ (value >> 31n);
}

/** Only a to z: what else a name holds is left as it is, in every language. */
function mediumKey(medium: string | null): string {
  return (medium || "GPU").replace(/[a-z]/g, (letter) => letter.toUpperCase());
}

function nameOf(medium: string, group: number): string {
  return `${group} ${medium}`;
}

interface TierNumbers {
  medium: string;
  group: number;
  blocks: bigint | string | number;
  mixedHashes: bigint | string;
}

function textOf(tiers: readonly TierNumbers[]): string {
  return tiers.map((tier) => `${tier.group} ${tier.blocks} ${tier.mixedHashes} ${JSON.stringify(tier.medium)}`).join("\n");
}

/** By code points, as publishers sort: JavaScript's own order is that of UTF-16. */
function compareText(a: string, b: string): number {
  return Buffer.compare(Buffer.from(a), Buffer.from(b));
}
