/** A server that names the same page again is told so by name, and not read until memory is full. */
import assert from "node:assert/strict";
import { createServer, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import { test } from "node:test";

import { Code } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";

import {
  connect,
  EndlessList,
  ErrorReason,
  failureOf,
  Index,
  IndexService,
  mayRepeat,
  Prefetch,
  PrefetchService,
  Registry,
  RegistryService,
} from "../src/index.js";

/** Of two pages each names the other. */
const endless = ({ pageToken }: { pageToken: string }) => ({ nextPageToken: pageToken === "one" ? "other" : "one" });

test("a list without an end is not read for ever", { timeout: 30_000 }, async () => {
  const adapter = connectNodeAdapter({
    routes: (router) => {
      router.service(RegistryService, { getEngine: (request) => ({ engine: {}, ...endless(request) }), listEngines: endless });
      router.service(IndexService, { listSources: endless });
      router.service(PrefetchService, { listOperations: endless });
    },
  });
  const server = createServer(adapter);
  const sessions: ServerHttp2Session[] = [];
  server.on("session", (session) => sessions.push(session));
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const transport = connect(`127.0.0.1:${(server.address() as AddressInfo).port}`);
  const registry = new Registry(transport);
  const lists = [
    () => registry.getEngine("e"),
    () => registry.listEngines(),
    () => new Index(transport).listSources(),
    () => new Prefetch(transport).listOperations(),
  ];
  for (const list of lists) {
    await assert.rejects(list, (error) => {
      const failure = failureOf(error);
      assert.deepEqual([failure.code, failure.reason, mayRepeat(failure)], [Code.Internal, ErrorReason.INTERNAL, false]);
      return error instanceof EndlessList;
    });
  }
  sessions.forEach((session) => session.destroy());
  server.close();
});
