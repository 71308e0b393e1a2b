/**
 * A real rank's cache, driven with the generated stub. Its storage has six pages of the tokens 0 to 23:
 * tests/integration/test_prefetch_clients.py opens it.
 */
import assert from "node:assert/strict";
import { test } from "node:test";

import { clientOf, connect, ErrorReason, failureOf, mayRepeat, OperationState, PrefetchService } from "../src/index.js";

const address = process.env["KVGRPC_TEST_CACHE"];
const skip = address === undefined && "KVGRPC_TEST_CACHE names no rank with a cache";
const tokens = Array.from({ length: 24 }, (_, token) => BigInt(token));

test("the cache of a rank is driven and watched", { skip, timeout: 30_000 }, async () => {
  const cache = clientOf(PrefetchService, connect(address!));
  const ended = async (operationId: string) => {
    let last;
    for await (const message of cache.watchOperations({ operationIds: [operationId] })) {
      last = message.operations.at(-1) ?? last;
    }
    assert.ok(last?.quiescent, "a watch of named operations ends with them");
    return last;
  };

  const found = await cache.lookup({ pages: { tokens } });
  assert.deepEqual([found.hostPages, found.storagePages], [0, 6]);
  const prefetch = await cache.startPrefetch({ pages: { tokens }, requestId: "typescript" });
  const came = await ended(prefetch.operation!.operationId);
  assert.deepEqual([came.state, came.completedPages], [OperationState.DONE, 6]);
  const backup = await cache.startBackup({ pages: { tokens } });
  assert.equal((await ended(backup.operation!.operationId)).completedPages, 6);
  const info = await cache.getCacheInfo({});
  assert.deepEqual([info.storageBackend, Number(info.tiers[0]?.usedPages)], ["file", 6]);

  const wrong = cache.startPrefetch({ pages: { pageHashes: [new Uint8Array(32), new Uint8Array(31)] } });
  await assert.rejects(wrong, (error) => {
    const failure = failureOf(error);
    assert.deepEqual([failure.reason, failure.metadata["field"]], [ErrorReason.INVALID_REQUEST, "pages.page_hashes[1]"]);
    return !mayRepeat(failure);
  });
});
