/** The rules of docs/followers.md: what a cache shows with each item, over calls that answer at once and pauses that take no time. */
import assert from "node:assert/strict";
import { test, type TestContext } from "node:test";

import { Code, ConnectError, type Client } from "@connectrpc/connect";

import { Cache, followEvents, watchEvents, type WatchItem } from "../src/index.js";
import { ErrorInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import { type EventService, WatchMode } from "../src/gen/kvgrpc/v1/event_service_pb.js";

const { SNAPSHOT, TAIL } = WatchMode;
const SILENCE_MS = 5_000;

/** What one call says, and how it ends; undefined: in good order. */
type Call = { said: unknown[]; end?: ConnectError | undefined };
interface Followed {
  shown: string[];
  items: WatchItem[];
  requests: Record<string, unknown>[];
  pauses: number[];
}

/** Follows until the calls are used up: the items, and which of the blocks 1 to 9 the cache held with each. */
async function followed(t: TestContext, ...calls: Call[]): Promise<Followed> {
  const result: Followed = { shown: [], items: [], requests: [], pauses: [] };
  const aborter = new AbortController();
  const waiting = globalThis.setTimeout;
  t.mock.method(globalThis, "setTimeout", (done: () => void, delay: number) => {
    if (delay !== SILENCE_MS) {
      result.pauses.push(delay);
    }
    return waiting(done, delay === SILENCE_MS ? delay : 0);
  });
  const client = {
    async *watch(request: Record<string, unknown>) {
      const call = calls[result.requests.push(request) - 1];
      if (call === undefined) {
        aborter.abort();
        return;
      }
      yield* call.said;
      if (call.end !== undefined) {
        throw call.end;
      }
    },
  } as unknown as Client<typeof EventService>;
  const cache = new Cache();
  for await (const item of followEvents(client, cache, { signal: aborter.signal })) {
    if (item.kind === "failed") {
      continue; // failures.test.ts looks at these
    }
    result.items.push(item);
    const held = [1n, 2n, 3n, 4n, 5n, 6n, 7n, 8n, 9n].filter((hash) => cache.holds(hash));
    result.shown.push(`${item.kind}: ${held.join("")}`);
  }
  return result;
}

const broken = new ConnectError("broken", Code.Unavailable);
function refused(reason: string): Call {
  const info = { desc: ErrorInfoSchema, value: { reason: `ERROR_REASON_${reason}`, domain: "kvgrpc.dev" } };
  return { said: [], end: new ConnectError("refused", Code.Aborted, undefined, [info]) };
}
const compacted = refused("EVENTS_COMPACTED");

// [0, [["BlockStored", [hash], nil, nil, 1]], 0]
const stored = (hash: number) => Buffer.concat([Buffer.from([0x93, 0, 0x91, 0x95, 0xab]), Buffer.from("BlockStored"), Buffer.from([0x91, hash, 0xc0, 0xc0, 1, 0])]);
const noBatch = Buffer.from([0xc1]);
const say = (name: string, value: object) => ({ kind: { case: name, value } });
const begin = (logId: string, first: number) => say("begin", { stream: { logId }, firstSequence: `${first}` });
const part = (next: number, index: number, last: boolean, payload: Buffer, state?: object) =>
  say("snapshot", { nextSequence: `${next}`, index, last, payloads: [payload], state });
const raw = (first: number, ...payloads: Buffer[]) => say("raw", { firstSequence: `${first}`, payloads });
const hole = (first: number, last: number) => say("dropped", { firstSequence: `${first}`, lastSequence: `${last}`, cause: "encode" });
const beat = (next: number, state?: object) => say("heartbeat", { nextSequence: `${next}`, state });
const other = (next: number) => ({ nextSequence: `${next}`, tiers: [{ medium: "GPU", group: 0, blocks: "7", mixedHashes: "7" }] });
const known = [begin("a", 1), part(1, 0, true, stored(1))];

test("what is known is shown until a snapshot is complete", async (t) => {
  const { shown, items } = await followed(
    t,
    { said: [...known, raw(1, stored(2))], end: broken },
    compacted,
    { said: [begin("a", 9), part(9, 0, false, stored(3))], end: broken },
    { said: [begin("a", 9), part(9, 0, false, noBatch)] },
    { said: [begin("a", 9), part(9, 0, false, stored(4)), part(10, 0, false, stored(5)), part(10, 1, true, stored(6)), raw(10, stored(7))] },
  );
  assert.deepEqual(shown, [
    ...["begin: ", "snapshot: 1", "batch: 12"],
    ...["begin: 12", "snapshot: 12"],
    ...["begin: 12", "unreadable: 12"],
    ...["begin: 12", "snapshot: 12", "snapshot: 12", "snapshot: 56", "batch: 567"],
  ]);
  assert.deepEqual(items.flatMap((item) => (item.kind === "begin" ? [item.fresh] : [])), [true, false, false, false]);
});

test("a snapshot that does not come to its own digest is not shown", async (t) => {
  const { shown } = await followed(
    t,
    { said: known, end: broken },
    compacted,
    { said: [begin("a", 9), part(9, 0, true, stored(3), other(9)), raw(9, stored(4))] },
    { said: [begin("a", 9), part(9, 0, true, stored(5))] },
  );
  assert.deepEqual(shown, ["begin: ", "snapshot: 1", "begin: 1", "begin: 1", "snapshot: 5"]);
});

const voids: [string, Call[], string][] = [
  ["STALE_LOG", [{ said: known, end: broken }, refused("STALE_LOG")], "void"],
  ["EVENTS_SEQUENCE_IN_FUTURE", [{ said: known, end: broken }, refused("EVENTS_SEQUENCE_IN_FUTURE")], "void"],
  ["a begin of another log", [{ said: known, end: broken }, { said: [begin("b", 1), raw(1, stored(2))] }], "void"],
  ["what is no batch", [{ said: [...known, raw(1, noBatch, stored(2))] }], "unreadable"],
  ["a digest that differs", [{ said: [...known, beat(1, other(1)), raw(1, stored(2))] }], "void"],
];
for (const [name, calls, kind] of voids) {
  test(`after ${name} nothing is shown, before the next call too`, async (t) => {
    const { shown, requests } = await followed(t, ...calls, { said: [begin("b", 2), part(2, 0, true, stored(3))] });
    assert.deepEqual(shown, ["begin: ", "snapshot: 1", `${kind}: `, "begin: ", "snapshot: 3"]);
    assert.equal(requests.at(-2)!["mode"], SNAPSHOT);
  });
}

test("a snapshot of another log ends what was shown of the first", async (t) => {
  const { shown } = await followed(t, { said: known, end: broken }, compacted, { said: [begin("b", 2), part(2, 0, true, stored(3))] });
  assert.deepEqual(shown, ["begin: ", "snapshot: 1", "begin: ", "snapshot: 3"]);
});

test("a repeat is passed over, and what follows it is taken", async (t) => {
  const said = [begin("a", 2), part(2, 0, true, stored(1)), raw(1, stored(9), stored(2)), hole(0, 1), raw(3, stored(3))];
  const { shown, requests } = await followed(t, { said, end: broken });
  assert.deepEqual(shown, ["begin: ", "snapshot: 1", "batch: 12", "batch: 123"]);
  assert.equal(requests[1]!["fromSequence"], "4");
});

for (const early of [raw(3, stored(9)), hole(3, 4)]) {
  for (const before of [[], [part(3, 0, false, stored(8))]]) {
    test(`a ${early.kind.case} behind a gap, ${before.length ? "" : "not "}within a snapshot, is not taken`, async (t) => {
      const said = [begin("a", 2), part(2, 0, true, stored(1)), ...before, early, raw(5, stored(9))];
      const { shown, requests } = await followed(t, { said }, { said: [begin("a", 5), part(5, 0, true, stored(5))] });
      assert.deepEqual(shown.filter((line) => !line.startsWith("snapshot: 1")), ["begin: ", "begin: 1", "snapshot: 5"]);
      assert.equal(requests[1]!["mode"], SNAPSHOT);
    });
  }
}

test("a heartbeat under load says how much is missing", async (t) => {
  const { items } = await followed(t, { said: [...known, beat(6)], end: broken });
  const current = items.at(-1)!;
  assert.deepEqual(current.kind === "current" && [current.nextSequence, current.lag], [1n, 5n]);
});

test("whoever answers after a failure may keep snapshots", async (t) => {
  const { requests } = await followed(t, refused("FEATURE_DISABLED"), { said: [], end: broken }, { said: [], end: broken });
  assert.deepEqual(requests.slice(0, 3).map(({ mode }) => mode), [SNAPSHOT, TAIL, SNAPSHOT]);
});

test("who reads no snapshot begins empty at the oldest batch", async (t) => {
  const oldest = { said: [begin("a", 7), raw(7, stored(7))], end: broken };
  const { shown } = await followed(t, { said: known, end: broken }, compacted, refused("FEATURE_DISABLED"), oldest);
  assert.deepEqual(shown, ["begin: ", "snapshot: 1", "begin: ", "batch: 7"]);
});

test("a batch that cannot be read is passed where no snapshot makes up for it", async (t) => {
  const oldest = { said: [begin("a", 0), raw(0, stored(1), noBatch, stored(3))], end: broken };
  const { shown, requests } = await followed(t, refused("FEATURE_DISABLED"), oldest);
  assert.deepEqual(shown, ["begin: ", "batch: 1", "unreadable: ", "batch: 3"]);
  assert.equal(requests[2]!["fromSequence"], "3");
});

test("a follower that heard something goes on over a restart behind a proxy", async (t) => {
  const { shown } = await followed(
    t,
    { said: known, end: broken },
    { said: [], end: new ConnectError("502", Code.Unknown) },
    { said: [begin("a", 1), raw(1, stored(2))], end: broken },
  );
  assert.deepEqual(shown, ["begin: ", "snapshot: 1", "begin: 1", "batch: 12"]);
});

test("pauses grow where each snapshot is good and each heartbeat differs", async (t) => {
  const good = part(1, 0, true, Buffer.from([0x93, 0, 0x90, 0]), { nextSequence: "1", tiers: [] });
  const calls = Array.from({ length: 7 }, () => ({ said: [begin("a", 1), good, beat(1, other(1))] }));
  const { pauses } = await followed(t, ...calls);
  assert.ok(pauses[6]! >= 1_000 && pauses[6]! <= 2_000, `${pauses}`);
});

test("a reader without a cache is told what is void, too", async () => {
  const calls = [{ said: [begin("a", 1), raw(1, stored(1))], end: broken }, refused("STALE_LOG"), { said: [begin("b", 0)] }];
  let made = 0;
  const client = {
    async *watch() {
      const call = calls[made++]!;
      yield* call.said;
      if (call.end !== undefined) {
        throw call.end;
      }
    },
  } as unknown as Client<typeof EventService>;
  const kinds: string[] = [];
  for await (const item of watchEvents(client)) {
    if (kinds.push(item.kind) === 5) {
      break;
    }
  }
  assert.deepEqual(kinds, ["begin", "batch", "failed", "void", "begin"]);
});
