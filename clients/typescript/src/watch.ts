/** Follows one event stream for as long as the caller wants, over breaks and restarts. */
import type { Client } from "@connectrpc/connect";

import { failureOf, mayRepeat } from "./errors.js";
import { decodeBatch, type EventBatch } from "./events.js";
import { ErrorReason } from "./gen/kvgrpc/v1/error_reason_pb.js";
import { type EventService, WatchMode, type WatchResponse } from "./gen/kvgrpc/v1/event_service_pb.js";

export interface WatchOptions {
  /** Empty: the server publishes exactly one stream. */
  engine?: string;
  dp?: number;
  /** Where to go on: what an earlier "batch" said, plus one. Absent: from the oldest that is kept. */
  log?: string;
  fromSequence?: bigint;
  signal?: AbortSignal;
}

export type WatchItem =
  /** Batches from here on are complete. `fresh`: whatever was known before is void (first contact, another log, a hole). */
  | { kind: "begin"; log: string; sequence: bigint; fresh: boolean }
  | { kind: "batch"; log: string; sequence: bigint; batch: EventBatch }
  /** A payload that is no batch: forget what is known, or ask again. */
  | { kind: "unreadable"; log: string; sequence: bigint; cause: string }
  /** The publisher lost these; AllBlocksCleared follows. */
  | { kind: "dropped"; log: string; firstSequence: bigint; lastSequence: bigint; cause: string }
  /** All before `nextSequence` was told. */
  | { kind: "current"; log: string; nextSequence: bigint };

const FIRST_PAUSE_MS = 100;
const LONGEST_PAUSE_MS = 5_000;
const LOST = new Set([ErrorReason.EVENTS_COMPACTED, ErrorReason.STALE_LOG, ErrorReason.EVENTS_SEQUENCE_IN_FUTURE]);

/**
 * Replays, then tails, without end. A break is resumed behind the last batch; where that cannot be (the log moved on, or
 * is another one), reading starts at the oldest batch again, and "begin" says `fresh`.
 *
 * Ends when the signal aborts; throws what repeating cannot mend (no such stream, no permission).
 */
export async function* watchEvents(client: Client<typeof EventService>, options: WatchOptions = {}): AsyncGenerator<WatchItem> {
  const { engine = "", dp = 0, signal } = options;
  let log = options.log ?? "";
  let next = options.fromSequence;
  let pause = FIRST_PAUSE_MS;
  while (!signal?.aborted) {
    const cursor = next === undefined ? {} : { logId: log, fromSequence: next.toString() };
    const fresh = next === undefined;
    try {
      const stream = client.watch({ engine, dp, mode: WatchMode.TAIL, ...cursor }, signal ? { signal } : {});
      for await (const response of stream) {
        for (const item of itemsOf(response, log, fresh)) {
          log = item.log;
          next = after(item, next);
          pause = FIRST_PAUSE_MS;
          yield item;
        }
      }
    } catch (error) {
      if (signal?.aborted) {
        return;
      }
      const failure = failureOf(error);
      if (LOST.has(failure.reason)) {
        next = undefined;
        continue;
      }
      if (!mayRepeat(failure)) {
        throw error;
      }
      pause = Math.max(pause, failure.retryAfterMs ?? 0);
    }
    await sleep(pause * (0.5 + Math.random() / 2), signal);
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
  }
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
    yield { kind: "current", log, nextSequence: BigInt(kind.value.nextSequence) };
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
    case "current":
      return next;
  }
}

function sleep(milliseconds: number, signal: AbortSignal | undefined): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(done, milliseconds);
    signal?.addEventListener("abort", done, { once: true });
    function done(): void {
      clearTimeout(timer);
      signal?.removeEventListener("abort", done);
      resolve();
    }
  });
}
