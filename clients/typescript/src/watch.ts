/** Follows one event stream for as long as the caller wants, over breaks and restarts. */
import { type Client, Code, ConnectError } from "@connectrpc/connect";

import { type Failure, failureOf, mayRepeat } from "./errors.js";
import { decodeBatch } from "./events.js";
import type { Cache, Verdict } from "./cache.js";
import type { WatchItem } from "./items.js";
import { sleep, untilSilent } from "./silence.js";
import { ErrorReason } from "./gen/kvgrpc/v1/error_reason_pb.js";
import { type EventService, type SnapshotPart, type WatchBegin, WatchMode, type WatchResponse } from "./gen/kvgrpc/v1/event_service_pb.js";

export interface WatchOptions {
  /** Empty: the server publishes exactly one stream. */
  engine?: string;
  dp?: number;
  /** Where to go on: what an earlier "batch" said, plus one. Absent: from the oldest that is kept. */
  log?: string;
  fromSequence?: bigint;
  /** Begins with the state as a snapshot, and not with the oldest batch that is kept; where the server keeps none, as before. */
  snapshot?: boolean;
  signal?: AbortSignal;
}

const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2_000;
/** After so long without a failure the next one is the first again. */
const CALM_MS = 60_000;
/** A publisher that asks for more time is asked again all the same. */
const LONGEST_ASKED_MS = 60_000;
/** Heartbeats come each second: a publisher from which nothing comes for so long is taken for gone. */
const SILENCE_MS = 5_000;
const ANOTHER_LOG = new Set([ErrorReason.STALE_LOG, ErrorReason.EVENTS_SEQUENCE_IN_FUTURE]);
/** What a connection that breaks is called: a server that was killed is CANCELED, a reset connection ABORTED. */
const BROKEN = new Set([Code.Canceled, Code.Aborted, Code.DeadlineExceeded]);
/** The same once somebody answered; before the first one does it is a certificate, or no gRPC server at all. */
const BROKEN_WITHIN = new Set([Code.Internal, Code.Unknown]);

/**
 * `watchEvents` from a snapshot on, with a cache that hears every item before it is yielded. Where its digest differs from the
 * publisher's it is emptied ("void") and begins again with a snapshot; a snapshot that differs is not shown.
 */
export function followEvents(
  client: Client<typeof EventService>,
  cache: Cache,
  options: Pick<WatchOptions, "engine" | "dp" | "signal"> = {},
): AsyncGenerator<WatchItem> {
  return read(client, { ...options, snapshot: true }, (item) => cache.hear(item));
}

/**
 * Replays, then tails, without end. A break is resumed behind the last batch; where that cannot be (the log moved on, or
 * is another one), reading starts at the oldest batch again, and "begin" says `fresh`, or with a snapshot.
 *
 * Ends when the signal aborts, and with no failure: each pause begins with "failed".
 */
export function watchEvents(client: Client<typeof EventService>, options: WatchOptions = {}): AsyncGenerator<WatchItem> {
  return read(client, options, () => "unknown");
}

/** Where a reader stands. */
interface Cursor {
  log: string;
  /** The batch that comes next; undefined: nothing is known, or a snapshot is not complete. */
  next: bigint | undefined;
}

/** What came cannot be gone on with: only the state, or the oldest batch, is a beginning. */
class BeginAgain extends Error {
  constructor(
    cause: string,
    /** What is known is no state of the cache any more; otherwise it is one of a moment ago. */
    readonly isVoid: boolean,
  ) {
    super(cause);
  }
}

async function* read(
  client: Client<typeof EventService>,
  options: WatchOptions,
  hear: (item: WatchItem) => Verdict,
): AsyncGenerator<WatchItem> {
  const { engine = "", dp = 0, signal, snapshot = false } = options;
  const cursor: Cursor = { log: options.log ?? "", next: options.fromSequence };
  const pauses = new Pauses();
  let snapshots = snapshot;
  let begun = false;
  while (!signal?.aborted) {
    const resumes = cursor.next !== undefined;
    const from = resumes ? { logId: cursor.log, fromSequence: `${cursor.next}` } : {};
    const mode = !resumes && snapshots ? WatchMode.SNAPSHOT : WatchMode.TAIL;
    let ended: unknown = new ConnectError("the publisher ended the Watch", Code.Aborted);
    try {
      const stream = untilSilent((ending) => client.watch({ engine, dp, mode, ...from }, { signal: ending }), SILENCE_MS, signal);
      for await (const response of stream) {
        begun = true;
        for (const item of itemsOf(response, cursor, mode)) {
          if (hear(item) === "different") {
            throw new BeginAgain("a digest of the publisher's is not that of its events", item.kind === "current");
          }
          yield item;
          if (snapshots && item.kind === "unreadable") {
            throw new BeginAgain(item.cause, false);
          }
        }
      }
    } catch (error) {
      ended = error;
    }
    if (signal?.aborted) {
      return;
    }
    const failure = failureOf(ended);
    const isVoid = ended instanceof BeginAgain ? ended.isVoid : ANOTHER_LOG.has(failure.reason);
    const movedOn = ANOTHER_LOG.has(failure.reason) || failure.reason === ErrorReason.EVENTS_COMPACTED;
    if (movedOn || ended instanceof BeginAgain) {
      cursor.next = undefined;
    }
    if (isVoid) {
      const item: WatchItem = { kind: "void", log: cursor.log, cause: failure.message };
      cursor.log = "";
      hear(item);
      yield item;
    }
    const keepsNone = mode === WatchMode.SNAPSHOT && isWithoutSnapshots(failure);
    // Whoever answers next may keep snapshots.
    snapshots = keepsNone ? false : snapshots || (snapshot && cursor.next === undefined);
    if (!keepsNone && !(movedOn && resumes)) {
      yield { kind: "failed", log: cursor.log, failure, lasting: !movedOn && !(ended instanceof BeginAgain) && isLasting(failure, begun) };
      await sleep(Math.min(failure.retryAfterMs ?? 0, LONGEST_ASKED_MS) + pauses.next(), signal);
    }
  }
}

/** How long to wait, from failure to failure: twice as long each time, with jitter. */
class Pauses {
  #next = FIRST_PAUSE_MS;
  #failedAt = -Infinity;

  next(): number {
    if (performance.now() - this.#failedAt > CALM_MS) {
      this.#next = FIRST_PAUSE_MS;
    }
    this.#failedAt = performance.now();
    const pause = this.#next;
    this.#next = Math.min(pause * 2, LONGEST_PAUSE_MS);
    return pause * (0.5 + Math.random() / 2);
  }
}

/** Whether time alone can hardly mend it; docs/followers.md has the table. */
function isLasting(failure: Failure, begun: boolean): boolean {
  return !mayRepeat(failure) && !BROKEN.has(failure.code) && !(begun && BROKEN_WITHIN.has(failure.code));
}

/** Whether a server refused a snapshot because it keeps none, or is older than snapshots. */
function isWithoutSnapshots({ reason, metadata }: Failure): boolean {
  return reason === ErrorReason.FEATURE_DISABLED || (reason === ErrorReason.INVALID_REQUEST && metadata["field"] === "mode");
}

/** What a message says, with the cursor behind it. Throws BeginAgain for what does not follow the cursor. */
function* itemsOf(response: WatchResponse, cursor: Cursor, mode: WatchMode): Generator<WatchItem> {
  const { kind } = response;
  if (kind.case === "begin") {
    yield beginOf(kind.value, cursor, mode);
  } else if (kind.case === "raw") {
    let sequence = BigInt(kind.value.firstSequence);
    const next = reached(cursor, sequence);
    for (const payload of kind.value.payloads) {
      if (sequence >= next) {
        cursor.next = sequence + 1n;
        yield itemOf(payload, cursor.log, sequence);
      }
      sequence += 1n;
    }
  } else if (kind.case === "dropped") {
    const firstSequence = BigInt(kind.value.firstSequence);
    const lastSequence = BigInt(kind.value.lastSequence);
    if (reached(cursor, firstSequence) <= lastSequence) {
      cursor.next = lastSequence + 1n;
      yield { kind: "dropped", log: cursor.log, firstSequence, lastSequence, cause: kind.value.cause };
    }
  } else if (kind.case === "heartbeat" && cursor.next !== undefined) {
    const ahead = BigInt(kind.value.nextSequence) - cursor.next;
    const lag = ahead > 0n ? ahead : 0n;
    yield { kind: "current", log: cursor.log, nextSequence: cursor.next, lag, state: kind.value.state };
  } else if (kind.case === "snapshot" && (kind.value.index === 0 || cursor.next === undefined)) {
    cursor.next = kind.value.last ? BigInt(kind.value.nextSequence) : undefined;
    yield partOf(kind.value, cursor.log);
  }
}

function beginOf({ stream, firstSequence }: WatchBegin, cursor: Cursor, mode: WatchMode): WatchItem {
  const log = stream?.logId ?? "";
  const isOther = log !== cursor.log;
  if (isOther && cursor.log !== "" && cursor.next !== undefined) {
    throw new BeginAgain(`log ${cursor.log} is over, ${log} is current`, true);
  }
  const fresh = mode === WatchMode.SNAPSHOT ? isOther : cursor.next === undefined;
  const sequence = BigInt(firstSequence);
  cursor.log = log;
  if (mode === WatchMode.TAIL) {
    cursor.next ??= sequence;
  }
  return { kind: "begin", log, sequence, fresh };
}

function partOf({ index, last, state, payloads, nextSequence }: SnapshotPart, log: string): WatchItem {
  const next = BigInt(nextSequence);
  try {
    const events = payloads.flatMap((payload) => decodeBatch(payload).events);
    return { kind: "snapshot", log, nextSequence: next, events, index, last, state };
  } catch (error) {
    return { kind: "unreadable", log, sequence: next, cause: String(error) };
  }
}

function itemOf(payload: Uint8Array, log: string, sequence: bigint): WatchItem {
  try {
    return { kind: "batch", log, sequence, batch: decodeBatch(payload) };
  } catch (error) {
    return { kind: "unreadable", log, sequence, cause: String(error) };
  }
}

/** The cursor, where nothing is missing between it and `first`. */
function reached(cursor: Cursor, first: bigint): bigint {
  if (cursor.next === undefined || first > cursor.next) {
    throw new BeginAgain(`a Watch went from ${cursor.next} to ${first}`, false);
  }
  return cursor.next;
}
