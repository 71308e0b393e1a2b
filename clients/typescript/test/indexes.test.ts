/** Several indexes of one fleet: whoever is away costs a router nothing but what it asked in that moment. */
import assert from "node:assert/strict";
import { createServer as createHttp2, type ServerHttp2Session } from "node:http2";
import { type AddressInfo, createServer, type Socket } from "node:net";
import { test, type TestContext } from "node:test";

import { Code, ConnectError } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";

import { connect, failureOf, Indexes, IndexService } from "../src/index.js";

/** Answers each question with its name, and none that has no prompt. */
async function serving(t: TestContext, name: string): Promise<string> {
  const adapter = connectNodeAdapter({
    routes: (router) =>
      router.service(IndexService, {
        score: ({ prompts }) => {
          if (prompts.length === 0) {
            throw new ConnectError("no prompt", Code.InvalidArgument);
          }
          return { prompts: [{ scores: [{ engine: name }] }] };
        },
        listSources: () => ({}),
      }),
  });
  const server = createHttp2(adapter);
  const sessions: ServerHttp2Session[] = [];
  server.on("session", (session) => sessions.push(session));
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  t.after(() => {
    sessions.forEach((session) => session.destroy());
    server.close();
  });
  return `127.0.0.1:${(server.address() as AddressInfo).port}`;
}

/** Takes connections, and says nothing. */
async function hanging(t: TestContext): Promise<string> {
  const sockets: Socket[] = [];
  const server = createServer((socket) => sockets.push(socket.on("error", () => undefined)));
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  t.after(() => {
    sockets.forEach((socket) => socket.destroy());
    server.close();
  });
  return `127.0.0.1:${(server.address() as AddressInfo).port}`;
}

const answeredBy = async (indexes: Indexes) => (await indexes.score({ prompts: [{}] }))?.prompts[0]?.scores[0]?.engine;

test("the next index answers where one refuses", { timeout: 60_000 }, async (t) => {
  const indexes = new Indexes([connect("127.0.0.1:1"), connect(await serving(t, "well"))], { waitMs: 10_000 });
  assert.deepEqual([await answeredBy(indexes), await answeredBy(indexes), indexes.unanswered], ["well", "well", 0]);
  await assert.rejects(indexes.score({}), (error) => failureOf(error).code === Code.InvalidArgument);
});

test("one that hangs costs one question and is asked last", { timeout: 60_000 }, async (t) => {
  const indexes = new Indexes([connect(await hanging(t)), connect(await serving(t, "well"))], { waitMs: 1_000 });
  const began = performance.now();
  assert.equal(await answeredBy(indexes), undefined);
  assert.ok(performance.now() - began >= 900);
  assert.deepEqual([await answeredBy(indexes), await answeredBy(indexes), indexes.unanswered], ["well", "well", 1]);
});
