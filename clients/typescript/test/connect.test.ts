/** What becomes of a connection whose other end stands still. */
import assert from "node:assert/strict";
import { createServer as createHttp2 } from "node:http2";
import { type AddressInfo, connect as connectTo, createServer, type Server, type Socket } from "node:net";
import { test } from "node:test";

import { connectNodeAdapter } from "@connectrpc/connect-node";

import { Cache, clientOf, connect, EventService, followEvents } from "../src/index.js";

async function listening(server: { listen(port: number, host: string, done: () => void): unknown; address(): unknown }): Promise<number> {
  await new Promise<void>((done) => server.listen(0, "127.0.0.1", done));
  return (server.address() as AddressInfo).port;
}

/** A publisher of an empty cache. */
function publisher() {
  const handler = connectNodeAdapter({
    routes: (router) =>
      router.service(EventService, {
        async *watch(_, { signal }) {
          yield { kind: { case: "begin", value: { stream: { logId: "a" } } } };
          yield { kind: { case: "snapshot", value: { last: true, state: {} } } };
          while (!signal.aborted) {
            yield { kind: { case: "heartbeat", value: {} } };
            await new Promise((done) => setTimeout(done, 100));
          }
        },
      }),
  });
  return createHttp2(handler);
}

/** Carries connections to a port; those that are frozen stay open and carry nothing any more. */
function proxy(port: number): { server: Server; freeze: () => void; end: () => void } {
  const pairs: [Socket, Socket][] = [];
  const server = createServer((from) => {
    const onward = connectTo(port, "127.0.0.1");
    from.pipe(onward).on("error", () => from.destroy());
    onward.pipe(from).on("error", () => onward.destroy());
    pairs.push([from, onward]);
  });
  const each = (act: (from: Socket, onward: Socket) => void) => pairs.forEach(([from, onward]) => act(from, onward));
  const freeze = () => each((from, onward) => (from.unpipe(), onward.unpipe(), from.resume(), onward.resume()));
  return { server, freeze, end: () => each((from, onward) => (from.destroy(), onward.destroy())) };
}

test("a frozen publisher is left for who answers at its address", { timeout: 20_000 }, async () => {
  const http = publisher();
  const between = proxy(await listening(http));
  const ending = new AbortController();
  const client = clientOf(EventService, connect(`127.0.0.1:${await listening(between.server)}`));
  let frozenAt = 0;
  let back = 0;
  for await (const item of followEvents(client, new Cache(), { signal: ending.signal })) {
    if (item.kind === "current" && frozenAt === 0) {
      between.freeze();
      frozenAt = performance.now();
    } else if (item.kind === "current" && performance.now() - frozenAt > 1_000) {
      back = performance.now() - frozenAt;
      ending.abort();
    }
  }
  between.end();
  between.server.close();
  http.close();
  assert.ok(back < 7_000, `back after ${back} ms`);
});
