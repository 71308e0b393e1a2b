/** The golden batches that every implementation reads alike: tests/conformance/events. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { decodeBatch, type BlockHash, type KVEvent } from "../src/index.js";

const folder = join(dirname(fileURLToPath(import.meta.url)), "../../../../tests/conformance/events");
// Hashes need 64 bits, more than JSON.parse keeps: they are read as text.
const written = readFileSync(join(folder, "cases.json"), "utf8").replace(/([:[,]\s*)(-?\d{15,})(?=\s*[,\]}])/g, '$1"$2"');
const cases = JSON.parse(written) as Record<string, { ts: number; rank: number | null; events: Record<string, unknown>[] }>;

for (const [name, expected] of Object.entries(cases)) {
  test(`${name} reads as its case`, () => {
    const batch = decodeBatch(readFileSync(join(folder, `${name}.msgpack`)));
    assert.equal(batch.ts, Number(expected.ts));
    assert.equal(batch.dataParallelRank, expected.rank == null ? null : Number(expected.rank));
    assert.deepEqual(batch.events.map(asCase), expected.events.map(comparable));
  });
}

test("what is no batch is refused, whatever it is", () => {
  for (const bytes of [[], [0xc1, 0xff], [0x01], [0x92, 0x01, 0x01], [0xdd, 0xff, 0xff, 0xff, 0xff]]) {
    assert.throws(() => decodeBatch(new Uint8Array(bytes)), TypeError);
  }
});

/** An event in the words of cases.json. */
function asCase(event: KVEvent): Record<string, unknown> {
  switch (event.type) {
    case "AllBlocksCleared":
      return { type: event.type };
    case "TierBlocksCleared":
      return { type: event.type, medium: event.medium };
    case "UnknownEvent":
      return { type: event.type, name: event.name };
    case "BlockRemoved":
      return comparable({ type: event.type, block_hashes: event.blockHashes.map(text), medium: event.medium, ...event.more });
    case "BlockStored":
      return comparable({
        type: event.type,
        block_hashes: event.blockHashes.map(text),
        parent_block_hash: event.parentBlockHash === null ? null : text(event.parentBlockHash),
        token_ids: event.tokenIds,
        block_size: event.blockSize,
        medium: event.medium,
        ...event.more,
      });
  }
}

/** Without absent fields, with all numbers as text, and with unknown keys beside the known ones. */
function comparable(event: Record<string, unknown>): Record<string, unknown> {
  const { unknown_keys, raw, ...known } = event;
  const all = { ...known, ...(unknown_keys as Record<string, unknown> | undefined) };
  return JSON.parse(
    JSON.stringify(Object.fromEntries(Object.entries(all).filter(([, value]) => value != null)), (_, value: unknown) =>
      typeof value === "bigint" || typeof value === "number" ? String(value) : value,
    ),
  ) as Record<string, unknown>;
}

function text(hash: BlockHash): string {
  return typeof hash === "bigint" ? String(hash) : `hex:${Buffer.from(hash).toString("hex")}`;
}
