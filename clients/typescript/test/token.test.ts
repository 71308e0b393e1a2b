/** Tokens are those of the vectors, which Python and Go are tested with too. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { authorization, connect, targetOf } from "../src/index.js";

interface Vector {
  secret: string;
  address: string;
  time: number;
  target: string;
  authorization: string;
}
const file = join(dirname(fileURLToPath(import.meta.url)), "../../../../tests/conformance/tokens/vectors.json");
const vectors = JSON.parse(readFileSync(file, "utf8")) as Vector[];

test("tokens are those of the vectors", () => {
  assert.ok(vectors.length > 0);
  for (const vector of vectors) {
    assert.equal(targetOf(vector.address), vector.target);
    assert.equal(authorization(vector.secret, vector.target, vector.time), vector.authorization);
  }
});

test("an address that is none has no target", () => {
  for (const address of ["", "nowhere", "a:b", "a:99999", "fd00::7:1"]) assert.throws(() => targetOf(address), TypeError);
});

test("a secret that is soon guessed is not taken, and none without TLS", () => {
  assert.throws(() => connect("127.0.0.1:1", { secret: "short", tls: {} }), TypeError);
  assert.throws(() => connect("127.0.0.1:1", { secret: "long-enough-a-secret" }), TypeError);
});
