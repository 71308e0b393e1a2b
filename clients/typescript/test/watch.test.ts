/** What `watchEvents` does where the log goes on without it. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { Code, ConnectError, type Client } from "@connectrpc/connect";

import { watchEvents } from "../src/index.js";
import { ErrorInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import { type EventService } from "../src/gen/kvgrpc/v1/event_service_pb.js";

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
      assert.fail(item.kind);
    }
    const pauses = calls.slice(1).map((call, index) => call - calls[index]!);
    assert.equal(pauses.length, 3);
    assert.ok(pauses.every((pause) => pause > 40), `paused for ${pauses}`);
  });
}
