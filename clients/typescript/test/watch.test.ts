/** What `watchEvents` does where the log goes on without it, and where calls break. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { Code, ConnectError, type Client } from "@connectrpc/connect";

import * as everything from "../src/index.js";
import { watchEvents, type WatchItem, type WatchOptions } from "../src/index.js";
import { ErrorInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import { type EventService, WatchMode } from "../src/gen/kvgrpc/v1/event_service_pb.js";

for (const snapshot of [false, true]) {
  test(`a reader that the log overtakes each time pauses before each call, ${snapshot ? "with" : "without"} a snapshot`, async () => {
    const calls: number[] = [];
    const aborter = new AbortController();
    const client = {
      async *watch() {
        calls.push(performance.now());
        if (calls.length === 4) {
          aborter.abort();
        }
        const info = { reason: "ERROR_REASON_EVENTS_COMPACTED", domain: "kvgrpc.dev" };
        throw new ConnectError("compacted", Code.OutOfRange, undefined, [{ desc: ErrorInfoSchema, value: info }]);
      },
    } as unknown as Client<typeof EventService>;
    for await (const item of watchEvents(client, { snapshot, signal: aborter.signal })) {
      assert.equal(item.kind, "failed");
    }
    const pauses = calls.slice(1).map((call, index) => call - calls[index]!);
    assert.equal(pauses.length, 3);
    assert.ok(pauses.every((pause) => pause > 40), `paused for ${pauses}`);
  });
}

/** One call after the other, each as its script says; what was asked for, too. */
function scripted(...calls: ((signal: AbortSignal) => AsyncIterable<unknown>)[]) {
  const requests: Record<string, unknown>[] = [];
  const watch = (request: Record<string, unknown>, { signal }: { signal: AbortSignal }) => {
    requests.push(request);
    return calls[requests.length - 1]!(signal);
  };
  return { client: { watch } as unknown as Client<typeof EventService>, requests };
}

const began = (firstSequence: string) => ({ kind: { case: "begin", value: { stream: { logId: "a" }, firstSequence } } });
const empty = new Uint8Array([0x93, 0, 0x90, 0]);
const raw = (firstSequence: string) => ({ kind: { case: "raw", value: { firstSequence, payloads: [empty] } } });

async function* broken(code: Code, ...messages: unknown[]) {
  yield* messages;
  throw new ConnectError("broken", code);
}

async function* refused(reason: string, ...messages: unknown[]) {
  yield* messages;
  const value = { reason: `ERROR_REASON_${reason}`, domain: "kvgrpc.dev" };
  throw new ConnectError("refused", Code.Aborted, undefined, [{ desc: ErrorInfoSchema, value }]);
}

async function items(client: Client<typeof EventService>, count: number, options: WatchOptions = {}): Promise<WatchItem[]> {
  const said: WatchItem[] = [];
  for await (const item of watchEvents(client, options)) {
    // failures.test.ts looks at these.
    if (item.kind !== "failed" && said.push(item) === count) {
      break;
    }
  }
  return said;
}

for (const code of [Code.Canceled, Code.Aborted, Code.DeadlineExceeded, Code.Internal, Code.Unknown, Code.Unavailable]) {
  test(`a call that breaks with ${Code[code]} is gone on with behind its last batch`, async () => {
    const { client, requests } = scripted(
      () => broken(code, began("5"), raw("5")),
      () => broken(code, began("6"), raw("6")),
    );
    await items(client, 4);
    assert.deepEqual([requests[1]!["fromSequence"], requests[1]!["logId"]], ["6", "a"]);
  });
}

test("a call from which nothing comes is ended and gone on with, and a reader that takes its time is not", async () => {
  const { client, requests } = scripted(
    async function* (signal) {
      yield began("5");
      yield raw("5");
      await new Promise((resolve) => signal.addEventListener("abort", resolve));
      throw new ConnectError("aborted", Code.Canceled);
    },
    async function* (signal) {
      yield began("6");
      yield raw("6");
      assert.ok(!signal.aborted, "the time that the reader takes is not the publisher's");
    },
  );
  let batches = 0;
  for await (const item of watchEvents(client)) {
    if (item.kind === "batch" && ++batches === 2) {
      await new Promise((resolve) => setTimeout(resolve, 5_500));
      break;
    }
  }
  assert.deepEqual(requests.map((request) => request["fromSequence"]), [undefined, "6"]);
});

test("a call that its reader leaves is ended at the publisher, too", async () => {
  const signals: AbortSignal[] = [];
  const { client } = scripted(async function* (signal) {
    signals.push(signal);
    yield began("5");
    yield raw("5");
  });
  await items(client, 1);
  assert.deepEqual(signals.map((signal) => signal.aborted), [true]);
});

test("a new log may have snapshots where the one before had none", async () => {
  const { client, requests } = scripted(
    () => refused("FEATURE_DISABLED"),
    () => refused("STALE_LOG", began("5")),
    () => broken(Code.Unavailable, began("0")),
  );
  await items(client, 3, { snapshot: true });
  const { SNAPSHOT, TAIL } = WatchMode;
  assert.deepEqual(requests.map((request) => request["mode"]), [SNAPSHOT, TAIL, SNAPSHOT]);
});

test("batches that lie behind a gap are a reason to begin again", async () => {
  const { client, requests } = scripted(
    async function* () {
      yield* [began("5"), raw("5"), raw("7")];
    },
    () => broken(Code.Unavailable, began("5"), raw("5")),
  );
  const said = await items(client, 4);
  assert.deepEqual(said.map((item) => item.kind), ["begin", "batch", "begin", "batch"]);
  assert.equal(requests[1]!["fromSequence"], undefined);
});

test("the package has every service", () => {
  const services = Object.keys(everything).filter((name) => name.endsWith("Service"));
  assert.deepEqual(services, ["EventService", "IndexService", "PrefetchService", "PullService", "RegistryService", "ServerService", "TransferService"]);
});
