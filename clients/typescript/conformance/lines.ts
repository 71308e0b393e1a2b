/** How the driver spells what it was told; tests/conformance/scenarios/README.md has the forms. */
import { Code } from "@connectrpc/connect";

import { type Cache, ErrorReason, type Failure, mayRepeat, OperationState, OperationStop, Role, type RowInit } from "../src/index.js";
import type { RankId } from "../src/gen/kvgrpc/v1/common_pb.js";
import type { CacheScore, Placement } from "../src/gen/kvgrpc/v1/index_service_pb.js";
import type { CacheOperation } from "../src/gen/kvgrpc/v1/prefetch_service_pb.js";
import type { Engine } from "../src/gen/kvgrpc/v1/registry_service_pb.js";

export interface Row {
  engine: string;
  role: keyof typeof Role;
  epoch: string;
  grpc: string;
  dp?: number;
  dp_size?: number;
  model?: string;
}

export function rowOf({ engine, role, epoch, grpc, dp = 0, dp_size = 1, model = "" }: Row): RowInit {
  const layout = { dp: dp_size, pp: 1, cp: 1, tp: 1 };
  return { rank: { rank: { engine, dp }, epoch }, role: Role[role], endpoints: { grpc }, layout, dataPlane: "shm", model: { name: model } };
}

export function pagesOf(first: number, count: number): { tokens: bigint[] } {
  return { tokens: Array.from({ length: count }, (_, position) => BigInt(first + position)) };
}

export function headLine({ name, registeredRanks, expectedRanks, ready }: Engine): string {
  return `${name} ${registeredRanks}/${expectedRanks} ${ready ? "ready" : "waiting"}`;
}

export function engineLine(engine: Engine): string {
  const rows = joined(engine.rows.map(({ rank }) => `${at(rank!.rank!)}@${rank!.epoch}`), ",");
  const head = headLine(engine).slice(engine.name.length);
  return `${engine.name} ${Role[engine.role]}${head} rows=${rows} missing=${joined(engine.missingRanks.map(at), ",")}`;
}

function at({ dp, pp, cp, tp }: RankId): string {
  return `${dp}.${pp}.${cp}.${tp}`;
}

export function contentsLine(next: bigint, cache: Cache): string {
  const counts = new Map<string, number>();
  for (const { medium, blocks } of cache.blocks()) {
    counts.set(medium, (counts.get(medium) ?? 0) + blocks);
  }
  const media = [...counts].sort(([a], [b]) => (a < b ? -1 : 1)).map(([medium, blocks]) => `${medium}:${blocks}`);
  return `next=${next} blocks=${joined(media, ",")} whole=${cache.whole} doubtful=${cache.doubtful}`;
}

export function scoreLine(score: CacheScore): string {
  const { engine, dp, deviceBlocks, hostBlocks, diskBlocks, blocks, pageTokens } = score;
  return `${engine}/${dp} device=${deviceBlocks} host=${hostBlocks} disk=${diskBlocks} blocks=${blocks} page=${pageTokens}`;
}

export function placementLine(placement: Placement): string {
  const { engine, dp, deviceBlocks, hostBlocks, blocks, pageTokens, computeTokens, pull } = placement;
  const held = `device=${deviceBlocks} host=${hostBlocks} blocks=${blocks} page=${pageTokens}`;
  return `${engine}/${dp} ${held} compute=${computeTokens} pull=${pull?.engine ?? "-"}`;
}

export function operationLine(operation: CacheOperation): string {
  const stop = operation.stop === OperationStop.UNSPECIFIED ? "-" : OperationStop[operation.stop];
  const counts = `asked=${operation.askedPages} covered=${operation.coveredPages} completed=${operation.completedPages}`;
  return `${OperationState[operation.state]} stop=${stop} ${counts} quiescent=${operation.quiescent}`;
}

export function refusal(failure: Failure): string {
  const told = Object.entries(failure.metadata).sort(([a], [b]) => (a < b ? -1 : 1));
  const metadata = told.map(([key, value]) => ` ${key}=${value}`).join("");
  const may = `retry=${failure.retryAfterMs ?? "-"} repeat=${mayRepeat(failure)}`;
  return `refused ${codeName(failure.code)} ${ErrorReason[failure.reason]} ${may}${metadata}`;
}

/** As the protocol spells it: NotFound is NOT_FOUND. */
function codeName(code: Code): string {
  const name = Code[code].replace(/(?!^)[A-Z]/g, (letter) => `_${letter}`).toUpperCase();
  return name === "CANCELED" ? "CANCELLED" : name;
}

export function joined(parts: readonly string[], between: string): string {
  return parts.join(between) || "-";
}
