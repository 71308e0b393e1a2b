/** Golden messages as bytes and as JSON, both ways: tests/conformance/messages. */
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

import { createRegistry, fromBinary, fromJson, type JsonValue, toBinary, toJson } from "@bufbuild/protobuf";

import { file_kvgrpc_v1_event_service } from "../src/gen/kvgrpc/v1/event_service_pb.js";
import { file_kvgrpc_v1_index_service } from "../src/gen/kvgrpc/v1/index_service_pb.js";
import { file_kvgrpc_v1_prefetch_service } from "../src/gen/kvgrpc/v1/prefetch_service_pb.js";
import { file_kvgrpc_v1_registry_service } from "../src/gen/kvgrpc/v1/registry_service_pb.js";

const folder = new URL("../../../../tests/conformance/messages/", import.meta.url);
const messages = createRegistry(
  file_kvgrpc_v1_event_service,
  file_kvgrpc_v1_index_service,
  file_kvgrpc_v1_prefetch_service,
  file_kvgrpc_v1_registry_service,
);
const names = readdirSync(folder).flatMap((file) => (file.endsWith(".binpb") ? [file.slice(0, -".binpb".length)] : []));

test("there are golden messages", () => assert.ok(names.length >= 10));

for (const name of names) {
  test(`bytes and JSON of ${name} are made of each other`, () => {
    const schema = messages.getMessage(`kvgrpc.v1.${name.split(".")[0]}`)!;
    const told = JSON.parse(readFileSync(new URL(`${name}.json`, folder), "utf8")) as JsonValue;
    const message = fromBinary(schema, readFileSync(new URL(`${name}.binpb`, folder)));
    assert.deepEqual(toJson(schema, message), told);
    // Not the same bytes: of a NaN each encoder has its own.
    assert.deepEqual(toJson(schema, fromBinary(schema, toBinary(schema, fromJson(schema, told)))), told);
  });
}
