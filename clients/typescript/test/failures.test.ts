/** What a follower does about each failure: the table of docs/followers.md, which Python and Go are tested with too. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { test, type TestContext } from "node:test";
import { fileURLToPath } from "node:url";

import { Code, ConnectError, type Client } from "@connectrpc/connect";

import { Cache, ErrorReason, followEvents, watchEvents, type WatchItem } from "../src/index.js";
import { ErrorInfoSchema, RetryInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import { type EventService, WatchMode } from "../src/gen/kvgrpc/v1/event_service_pb.js";

interface Row {
  statuses: string[];
  retry_seconds?: number;
  waits_seconds?: number;
  cursor: string;
  first: string;
}
const table = join(dirname(fileURLToPath(import.meta.url)), "../../../../tests/conformance/events/failures.json");
const rows = JSON.parse(readFileSync(table, "utf8")) as Row[];
const SILENCE_MS = 5_000;
const LONGEST_PAUSE_MS = 2_000;

function refusal(status: string, retrySeconds?: number): ConnectError {
  const [name = "", reason, field = ""] = status.split(" ");
  const camel = name.toLowerCase().replace(/(^|_)([a-z])/g, (_, __, letter: string) => letter.toUpperCase());
  const code = Code[(camel === "Cancelled" ? "Canceled" : camel) as keyof typeof Code];
  const info = { desc: ErrorInfoSchema, value: { reason: `ERROR_REASON_${reason}`, domain: "kvgrpc.dev", metadata: { field } } };
  const retry = { desc: RetryInfoSchema, value: { retryDelay: { seconds: BigInt(retrySeconds ?? 0) } } };
  return new ConnectError("refused", code, undefined, [...(reason ? [info] : []), ...(retrySeconds === undefined ? [] : [retry])]);
}

const say = (name: string, value: object) => ({ kind: { case: name, value } });
// [0, [["BlockStored", [1], nil, nil, 1]], 0]
const stored = Buffer.concat([Buffer.from([0x93, 0, 0x91, 0x95, 0xab]), Buffer.from("BlockStored"), Buffer.from([0x91, 1, 0xc0, 0xc0, 1, 0])]);
const known = [
  say("begin", { stream: { logId: "a" }, firstSequence: "1" }),
  say("snapshot", { nextSequence: "1", index: 0, last: true, payloads: [stored] }),
];

/** What a follower does about the last of some calls, in the words of the table. */
async function does(t: TestContext, row: Row, ...ends: ConnectError[]): Promise<string> {
  const modes: WatchMode[] = [];
  const aborter = new AbortController();
  const waiting = globalThis.setTimeout;
  let pause: number | undefined;
  t.mock.method(globalThis, "setTimeout", (done: () => void, delay: number) => {
    pause = delay === SILENCE_MS ? pause : delay;
    return waiting(done, delay === SILENCE_MS ? delay : 0);
  });
  const client = {
    async *watch({ mode }: { mode: WatchMode }) {
      const end = ends[modes.push(mode) - 1];
      if (end === undefined) {
        aborter.abort();
        return;
      }
      pause = undefined;
      if (modes.length < ends.length) {
        yield* known;
      }
      throw end;
    },
  } as unknown as Client<typeof EventService>;
  const cache = new Cache();
  let lasting = false;
  for await (const item of followEvents(client, cache, { signal: aborter.signal })) {
    lasting = item.kind === "failed" && item.lasting;
  }
  t.mock.restoreAll();
  const words = [cache.holds(1n) ? "keep" : "forget"];
  const mode = WatchMode[modes.at(-1)!]!;
  if (pause === undefined) {
    words.push(`at once ${mode}`);
  } else {
    const least = (row.waits_seconds ?? 0) * 1_000;
    assert.ok(pause >= least + 50 && pause <= least + LONGEST_PAUSE_MS, `${pause}`);
    words.push("pause", mode);
  }
  return [...words, ...(lasting ? ["lasting"] : [])].join(", ");
}

for (const row of rows) {
  for (const status of row.statuses) {
    test(`${status}, RetryInfo ${row.retry_seconds}: ${row.cursor}; ${row.first}`, async (t) => {
      const refused = refusal(status, row.retry_seconds);
      assert.equal(await does(t, row, new ConnectError("broken", Code.Unavailable), refused), row.cursor);
      assert.equal((await does(t, row, refused)).replace(/^forget, /, ""), row.first);
    });
  }
}

async function firstOf(client: object): Promise<WatchItem> {
  for await (const item of watchEvents(client as Client<typeof EventService>)) {
    return item;
  }
  return assert.fail("it ended");
}

test("a failure is told with its reason", async () => {
  const item = await firstOf({
    async *watch() {
      throw refusal("NOT_FOUND STREAM_NOT_FOUND");
    },
  });
  assert.ok(item.kind === "failed" && item.lasting && item.failure.reason === ErrorReason.STREAM_NOT_FOUND);
});

test("silence is told by its name", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const first = firstOf({
    async *watch(_: unknown, { signal }: { signal: AbortSignal }) {
      await new Promise((resolve) => signal.addEventListener("abort", resolve));
      throw new ConnectError("aborted", Code.Canceled);
    },
  });
  t.mock.timers.tick(SILENCE_MS);
  const item = await first;
  assert.equal(item.kind === "failed" && item.failure.message, "nothing came for 5 s");
});
