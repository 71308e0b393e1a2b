/** Follows one event stream for as long as the caller wants, over breaks and restarts. */
import { type Client, Code } from "@connectrpc/connect";

import { type Failure, failureOf, mayRepeat } from "./errors.js";
import { decodeBatch, type EventBatch, type KVEvent } from "./events.js";
import { type Cache } from "./cache.js";
import { ErrorReason } from "./gen/kvgrpc/v1/error_reason_pb.js";
import { type EventService, type StateDigest, WatchMode, type WatchResponse } from "./gen/kvgrpc/v1/event_service_pb.js";

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

export type WatchItem =
  /** Batches from here on are complete. `fresh`: whatever was known before is void (first contact, another log, a hole). */
  | { kind: "begin"; log: string; sequence: bigint; fresh: boolean }
  /** A part of the state. Index 0: forget what is known. Once `last`, all before `nextSequence` is in, and comes to `state`. */
  | { kind: "snapshot"; log: string; nextSequence: bigint; events: KVEvent[]; index: number; last: boolean; state: StateDigest | undefined }
  | { kind: "batch"; log: string; sequence: bigint; batch: EventBatch }
  /** A payload that is no batch: forget what is known, or ask again. */
  | { kind: "unreadable"; log: string; sequence: bigint; cause: string }
  /** The publisher lost these; AllBlocksCleared follows. */
  | { kind: "dropped"; log: string; firstSequence: bigint; lastSequence: bigint; cause: string }
  /** All before `nextSequence` was told. `state`: the publisher's digest of the same or an earlier sequence, if it keeps one. */
  | { kind: "current"; log: string; nextSequence: bigint; state: StateDigest | undefined };

const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 2_000;
/** Heartbeats come each second: a publisher from which nothing comes for so long is taken for gone. */
const SILENCE_MS = 5_000;
const LOST = new Set([ErrorReason.EVENTS_COMPACTED, ErrorReason.STALE_LOG, ErrorReason.EVENTS_SEQUENCE_IN_FUTURE]);

const KEEPS_NONE = new Set([ErrorReason.FEATURE_DISABLED, ErrorReason.INVALID_REQUEST]);
/** What a connection that breaks is called: a server that was killed is CANCELED, a reset connection ABORTED. */
const BROKEN = new Set([Code.Canceled, Code.Aborted, Code.DeadlineExceeded]);
/** The same of a call that had begun; before that it is a certificate, or no gRPC server at all. */
const BROKEN_WITHIN = new Set([Code.Internal, Code.Unknown]);

/**
 * `watchEvents` from a snapshot on, with a cache that hears every item before it is yielded. Where its digest differs from the
 * publisher's it is emptied and begins again with a snapshot.
 */
export async function* followEvents(
  client: Client<typeof EventService>,
  cache: Cache,
  options: Pick<WatchOptions, "engine" | "dp" | "signal"> = {},
): AsyncGenerator<WatchItem> {
  let pause = FIRST_PAUSE_MS;
  for (let differs = true; differs && !options.signal?.aborted; ) {
    differs = false;
    for await (const item of watchEvents(client, { ...options, snapshot: true })) {
      const verdict = cache.hear(item);
      if (verdict === "different") {
        differs = true;
        break;
      }
      pause = verdict === "equal" ? FIRST_PAUSE_MS : pause;
      yield item;
    }
    if (differs) {
      cache.forget();
      await sleep(pause, options.signal);
      pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    }
  }
}

/**
 * Replays, then tails, without end. A break is resumed behind the last batch; where that cannot be (the log moved on, or
 * is another one), reading starts at the oldest batch again, or with a snapshot, and "begin" says `fresh`.
 *
 * Ends when the signal aborts; throws what repeating cannot mend (no such stream, no permission).
 */
export async function* watchEvents(client: Client<typeof EventService>, options: WatchOptions = {}): AsyncGenerator<WatchItem> {
  const { engine = "", dp = 0, signal } = options;
  let log = options.log ?? "";
  let next = options.fromSequence;
  let snapshots = options.snapshot ?? false;
  let pause = FIRST_PAUSE_MS;
  while (!signal?.aborted) {
    const cursor = next === undefined ? {} : { logId: log, fromSequence: next.toString() };
    const fresh = next === undefined;
    const mode = fresh && snapshots ? WatchMode.SNAPSHOT : WatchMode.TAIL;
    let begun = false;
    try {
      const stream = untilSilent((ending) => client.watch({ engine, dp, mode, ...cursor }, { signal: ending }), signal);
      reading: for await (const response of stream) {
        begun = true;
        if (next !== undefined && response.kind.case === "raw" && BigInt(response.kind.value.firstSequence) !== next) {
          // What lies between is lost, or would count twice: only the state, or the oldest batch, is a beginning.
          next = undefined;
          break;
        }
        for (const item of itemsOf(response, log, fresh)) {
          log = item.log;
          next = item.kind === "begin" && mode === WatchMode.SNAPSHOT ? undefined : after(item, next);
          pause = item.kind === "current" ? FIRST_PAUSE_MS : pause;
          yield item;
          if (snapshots && item.kind === "unreadable") {
            next = undefined;
            break reading;
          }
        }
      }
    } catch (error) {
      if (signal?.aborted) {
        return;
      }
      const failure = failureOf(error);
      if (mode === WatchMode.SNAPSHOT && KEEPS_NONE.has(failure.reason)) {
        snapshots = false;
        continue;
      }
      if (LOST.has(failure.reason)) {
        // Never at once again: a small journal overtakes the same reader each time. Another log may have snapshots.
        next = undefined;
        snapshots = options.snapshot ?? false;
      } else if (!mayRepeat(failure) && !isBreak(failure, begun)) {
        throw error;
      }
      pause = Math.max(pause, failure.retryAfterMs ?? 0);
    }
    await sleep(pause * (0.5 + Math.random() / 2), signal);
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
  }
}

/**
 * What a call says, until it ends, or is ended: by `signal`, where nothing came for SILENCE_MS while somebody waited, or where
 * nobody reads on.
 */
async function* untilSilent<Message>(
  call: (ending: AbortSignal) => AsyncIterable<Message>,
  signal: AbortSignal | undefined,
): AsyncGenerator<Message> {
  const aborter = new AbortController();
  const end = () => aborter.abort();
  signal?.addEventListener("abort", end, { once: true });
  let timer = setTimeout(end, SILENCE_MS);
  try {
    for await (const message of call(aborter.signal)) {
      clearTimeout(timer);
      yield message;
      timer = setTimeout(end, SILENCE_MS);
    }
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", end);
    // Whoever leaves the loop leaves the call: the library goes on with one that nobody reads.
    end();
  }
}

function isBreak(failure: Failure, begun: boolean): boolean {
  return BROKEN.has(failure.code) || (begun && BROKEN_WITHIN.has(failure.code));
}

function* itemsOf(response: WatchResponse, log: string, fresh: boolean): Generator<WatchItem> {
  const { kind } = response;
  if (kind.case === "begin") {
    yield { kind: "begin", log: kind.value.stream?.logId ?? "", sequence: BigInt(kind.value.firstSequence), fresh };
  } else if (kind.case === "raw") {
    let sequence = BigInt(kind.value.firstSequence);
    for (const payload of kind.value.payloads) {
      yield itemOf(payload, log, sequence);
      sequence += 1n;
    }
  } else if (kind.case === "dropped") {
    const { firstSequence, lastSequence, cause } = kind.value;
    yield { kind: "dropped", log, firstSequence: BigInt(firstSequence), lastSequence: BigInt(lastSequence), cause };
  } else if (kind.case === "heartbeat") {
    yield { kind: "current", log, nextSequence: BigInt(kind.value.nextSequence), state: kind.value.state };
  } else if (kind.case === "snapshot") {
    const { index, last, state, payloads } = kind.value;
    const nextSequence = BigInt(kind.value.nextSequence);
    try {
      const events = payloads.flatMap((payload) => decodeBatch(payload).events);
      yield { kind: "snapshot", log, nextSequence, events, index, last, state };
    } catch (error) {
      yield { kind: "unreadable", log, sequence: nextSequence, cause: String(error) };
    }
  }
}

function itemOf(payload: Uint8Array, log: string, sequence: bigint): WatchItem {
  try {
    return { kind: "batch", log, sequence, batch: decodeBatch(payload) };
  } catch (error) {
    return { kind: "unreadable", log, sequence, cause: String(error) };
  }
}

function after(item: WatchItem, next: bigint | undefined): bigint | undefined {
  switch (item.kind) {
    case "begin":
      return item.sequence;
    case "batch":
    case "unreadable":
      return item.sequence + 1n;
    case "dropped":
      return item.lastSequence + 1n;
    case "snapshot":
      return item.last ? item.nextSequence : undefined;
    case "current":
      return next;
  }
}

function sleep(milliseconds: number, signal: AbortSignal | undefined): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(done, signal?.aborted ? 0 : milliseconds);
    signal?.addEventListener("abort", done, { once: true });
    function done(): void {
      clearTimeout(timer);
      signal?.removeEventListener("abort", done);
      resolve();
    }
  });
}
