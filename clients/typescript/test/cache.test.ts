/** The golden log with its checkpoints, hostile payloads, and a follower over a scripted server. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { createClient, createRouterTransport } from "@connectrpc/connect";

import { Cache, decodeBatch, EventService, followEvents, keyOf, type WatchItem } from "../src/index.js";
import { type DigestKind, StateDigestSchema, WatchMode, type WatchRequest, type WatchResponseSchema } from "../src/gen/kvgrpc/v1/event_service_pb.js";

const folder = join(dirname(fileURLToPath(import.meta.url)), "../../../../tests/conformance/events");
const read = (name: string): unknown => JSON.parse(readFileSync(join(folder, name), "utf8"));

interface Tier {
  medium: string;
  group: number;
  blocks: number;
  mixed_hashes: string;
}
const log = read("checkpoints.json") as { payloads: string[]; digests: Record<string, Tier[]> };
const states = Object.entries(log.digests).map(([nextSequence, tiers]) =>
  create(StateDigestSchema, {
    nextSequence,
    tiers: tiers.map(({ medium, group, blocks, mixed_hashes }) => ({ medium, group, blocks: String(blocks), mixedHashes: mixed_hashes })),
  }),
);
const begin: WatchItem = { kind: "begin", log: "a", sequence: 0n, fresh: true };

function batchItem(payload: string | Uint8Array, sequence: number): WatchItem {
  const batch = decodeBatch(typeof payload === "string" ? Buffer.from(payload, "hex") : payload);
  return { kind: "batch", log: "a", sequence: BigInt(sequence), batch };
}

function cacheOfTheLog(): Cache {
  const cache = new Cache();
  cache.hear(begin);
  for (const [sequence, payload] of log.payloads.entries()) {
    cache.hear(batchItem(payload, sequence));
  }
  return cache;
}

test("a digest of the past is compared with its checkpoint", () => {
  const cache = cacheOfTheLog();
  assert.equal(states.length, 4);
  for (const state of states) {
    assert.equal(cache.hear({ kind: "current", log: "a", nextSequence: 200n, lag: 0n, state }), "equal", state.nextSequence);
    const other = create(StateDigestSchema, { nextSequence: state.nextSequence, tiers: [] });
    assert.equal(cache.compare(other), "different");
  }
  for (const nextSequence of ["0", "63", "65", "199", "256"]) {
    assert.equal(cache.compare(create(StateDigestSchema, { nextSequence })), "unknown", nextSequence);
  }
});

test("only the last 64 checkpoints are kept, and none of another log", () => {
  const cache = new Cache();
  cache.hear(begin);
  const empty = new Uint8Array([0x93, 0, 0x90, 0]);
  for (let sequence = 0; sequence < 100 * 64; sequence += 1) {
    cache.hear(batchItem(empty, sequence));
  }
  const at = (checkpoint: number) => cache.compare(create(StateDigestSchema, { nextSequence: String(checkpoint * 64) }));
  assert.deepEqual([at(36), at(37), at(99), at(100)], ["unknown", "equal", "equal", "equal"]);
  cache.hear(begin);
  assert.equal(at(99), "unknown");
});

test("a hash has its key", () => {
  const vectors = (read("digests.json") as { hashes: { hash: string; key: string }[] }).hashes;
  for (const { hash, key } of vectors) {
    const value = hash.startsWith("hex:") ? Buffer.from(hash.slice(4), "hex") : BigInt(hash);
    assert.equal(keyOf(value), BigInt(key));
  }
});

test("tiers and groups beyond the bound are passed over as by the publisher", () => {
  const places = read("places.json") as {
    payloads: string[];
    states: { places: number; blocks: number; mixed_hashes: string }[];
  };
  assert.equal(places.states.length, 9);
  const cache = new Cache();
  for (const [index, payload] of places.payloads.entries()) {
    cache.apply(decodeBatch(Buffer.from(payload, "hex")).events);
    const tiers = cache.digest();
    const mixed = tiers.reduce((sum, tier) => BigInt.asUintN(64, sum + tier.mixedHashes), 0n);
    const blocks = tiers.reduce((sum, tier) => sum + tier.blocks, 0);
    const { mixed_hashes, ...counts } = places.states[index]!;
    assert.deepEqual([{ places: tiers.length, blocks }, mixed], [counts, BigInt(mixed_hashes)], `batch ${index}`);
  }
});

type Parts = [string, number][];
const hostile = read("hostile.json") as Record<string, { parts: Parts; events: string[] | null }>;

for (const [name, { parts, events }] of Object.entries(hostile)) {
  test(`hostile: ${name} is read as the publisher reads it`, () => {
    const payload = Buffer.concat(parts.flatMap(([digits, times]) => Array<Buffer>(times).fill(Buffer.from(digits, "hex"))));
    if (events === null) {
      assert.throws(() => decodeBatch(payload), TypeError);
    } else {
      assert.deepEqual(decodeBatch(payload).events.map((event) => event.type), events);
    }
  });
}

type Answer = MessageInitShape<typeof WatchResponseSchema>;
const stored = Buffer.from("930091" + "92ac" + Buffer.from("BlockRemoved").toString("hex") + "9101" + "00", "hex");

function scripted(...calls: Answer[][]): { client: ReturnType<typeof createClient<typeof EventService>>; requests: WatchRequest[] } {
  const requests: WatchRequest[] = [];
  const transport = createRouterTransport(({ rpc }) => {
    rpc(EventService.method.watch, async function* (request) {
      requests.push(request);
      yield* calls[requests.length - 1] ?? [];
    });
  });
  return { client: createClient(EventService, transport), requests };
}

function began(firstSequence: string): Answer {
  return { kind: { case: "begin", value: { stream: { logId: "a" }, firstSequence } } };
}
function part(index: number, last: boolean): Answer {
  const state = last ? { nextSequence: "1", tiers: [] } : undefined;
  return { kind: { case: "snapshot", value: { nextSequence: "1", index, last, payloads: [stored], ...(state ? { state } : {}) } } };
}
function heartbeat(nextSequence: string, ...tiers: { medium: string; blocks: string }[]): Answer {
  return { kind: { case: "heartbeat", value: { nextSequence, state: { nextSequence, tiers } } } };
}
const raw: Answer = { kind: { case: "raw", value: { firstSequence: "1", payloads: [stored] } } };

test("a follower begins with a snapshot, resumes behind the last batch, and begins again where its digest differs", async () => {
  const { client, requests } = scripted(
    [began("1"), part(0, false), part(1, true), raw],
    [began("2"), heartbeat("2")],
    [began("2"), heartbeat("2", { medium: "GPU", blocks: "1" })],
    [began("1"), part(0, true), heartbeat("1")],
  );
  const cache = new Cache();
  const kinds: string[] = [];
  for await (const item of followEvents(client, cache)) {
    kinds.push(item.kind);
    if (requests.length === 4 && item.kind === "current") {
      break;
    }
  }
  assert.deepEqual(kinds, [
    ...["begin", "snapshot", "snapshot", "batch", "failed", "begin", "current", "failed", "begin", "void", "failed"],
    ...["begin", "snapshot", "current"],
  ]);
  const asked = requests.map(({ mode, fromSequence }) => [mode, fromSequence]);
  const { SNAPSHOT, TAIL } = WatchMode;
  assert.deepEqual(asked, [[SNAPSHOT, undefined], [TAIL, "2"], [TAIL, "2"], [SNAPSHOT, undefined]]);
});

test("a clear of one tier, and what cannot be read, leave what every reader knows", () => {
  const steps = read("clears.json") as { name: string; payload: string; held: { medium: string; group: number; blocks: number[] }[]; doubtful: boolean }[];
  assert.ok(steps.length > 10);
  const cache = new Cache();
  cache.hear(begin);
  for (const [sequence, { name, payload, held, doubtful }] of steps.entries()) {
    cache.hear(batchItem(payload, sequence));
    assert.deepEqual(cache.blocks(), held.map((place) => ({ ...place, blocks: place.blocks.length })), name);
    for (const { medium, group, blocks } of held) {
      assert.ok(blocks.every((block) => cache.holds(BigInt(block), medium, group)), name);
    }
    assert.equal(cache.doubtful, doubtful, name);
  }
});

test("a digest of a publisher that can read it ends a doubt", () => {
  const cache = new Cache();
  cache.hear(begin);
  const unknown = { type: "UnknownEvent", name: "BlockMoved", raw: new Uint8Array() } as const;
  cache.hear({ kind: "batch", log: "a", sequence: 0n, batch: { ts: 0, events: [], dataParallelRank: 0 } });
  cache.hear({ kind: "batch", log: "a", sequence: 1n, batch: { ts: 0, events: [unknown], dataParallelRank: 0 } });
  const told = (fields: MessageInitShape<typeof StateDigestSchema>) => cache.compare(create(StateDigestSchema, fields));
  assert.deepEqual([told({ nextSequence: "2", doubtful: true }), cache.doubtful], ["equal", true]);
  assert.deepEqual([told({ nextSequence: "2", kind: 99 as DigestKind }), cache.doubtful], ["unknown", true]);
  assert.deepEqual([told({ nextSequence: "0" }), cache.doubtful], ["unknown", true]);
  assert.deepEqual([told({ nextSequence: "2", kind: 1 }), cache.doubtful], ["equal", false]);
  // What its publisher could not read was read here.
  assert.equal(told({ nextSequence: "2", doubtful: true, tiers: [{ medium: "GPU", blocks: "1" }] }), "unknown");
  // A snapshot of a publisher that cannot read it either is as doubtful as that.
  const state = create(StateDigestSchema, { nextSequence: "3", doubtful: true });
  cache.hear({ kind: "snapshot", log: "a", nextSequence: 3n, events: [], index: 0, last: true, state });
  assert.ok(cache.doubtful);
});
