/** The TypeScript driver of tests/conformance/scenarios: a command of JSON on each line of its input, one line of answer each. */
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

import type { Transport } from "@connectrpc/connect";

import {
  Cache,
  clientOf,
  connect,
  EventService,
  failureOf,
  followEvents,
  Index,
  Prefetch,
  type Registration,
  Registry,
  RegistryService,
  Role,
  type WatchItem,
} from "../src/index.js";
import type { Engine } from "../src/gen/kvgrpc/v1/registry_service_pb.js";
import {
  contentsLine,
  engineLine,
  headLine,
  joined,
  operationLine,
  pagesOf,
  placementLine,
  refusal,
  rowOf,
  type Row,
  scoreLine,
} from "./lines.js";

/** Every field that any command may have. */
interface Command {
  op: string;
  as: string;
  address: string;
  ca?: string;
  secret?: string;
  within_ms?: number;
  timeout_ms: number;
  engine: string;
  role: keyof typeof Role;
  rows: Row[];
  wait_ready: boolean;
  state: string;
  ranks: number;
  next: string;
  hash: string;
  medium: string;
  hashes: string[];
  model?: string;
  engines?: string[];
  max_scores?: number;
  max_placements?: number;
  first_token: number;
  tokens: number;
  request_id: string;
}

const USUAL_MS = 20_000;
const LOOK_MS = 10;
const transports = new Map<string, Transport>();
const registrations = new Map<string, { registration: Registration; epoch: bigint }>();
const watches = new Map<string, { ending: AbortController; engines: Map<string, Engine>; complete: boolean }>();
const followers = new Map<string, Followed>();
const operations = new Map<string, { prefetch: Prefetch; id: string }>();

/** A follower's cache, and what its items told. */
class Followed {
  readonly ending = new AbortController();
  readonly cache = new Cache();
  /** All batches before it are in; the publisher has those before `upcoming`. */
  next = 0n;
  exact = false;
  failures = 0;
  told = 0;
  snapshots = 0;
  different = 0;
  readonly logs = new Set<string>();
  #upcoming = 0n;

  hear(item: WatchItem): void {
    if (item.log !== "") {
      this.logs.add(item.log);
    }
    if (item.kind === "snapshot") {
      this.snapshots += item.index === 0 ? 1 : 0;
      [this.exact, this.next] = [item.last, item.nextSequence];
    } else if (item.kind === "batch") {
      [this.exact, this.next] = [true, item.sequence + 1n];
    } else if (item.kind === "dropped") {
      this.next = item.lastSequence + 1n;
    } else if (item.kind === "current") {
      this.#upcoming = item.nextSequence + item.lag;
    } else if (item.kind === "void") {
      this.exact = false;
      this.different += item.cause.includes("digest") ? 1 : 0;
    } else if (item.kind === "failed") {
      this.failures += 1;
    }
  }

  isCurrentAt(next: bigint): boolean {
    return this.exact && this.next === next && this.#upcoming <= next;
  }

  contents(): string {
    this.told = this.failures;
    return contentsLine(this.next, this.cache);
  }
}

const acts: Record<string, (command: Command) => Promise<string> | string> = {
  async register({ as, rows, ...command }) {
    const addresses = command.address.split(",").map((address) => dial({ ...command, address }));
    const registration = await new Registry(addresses[0]!, ...addresses.slice(1)).register(rows.map(rowOf));
    const known = { registration, epoch: 0n };
    registration.onSuperseded = ({ epoch }) => (known.epoch = epoch);
    registrations.set(as, known);
    return "registered";
  },
  async state({ as, state }) {
    const known = registrations.get(as)!;
    await until(() => known.registration.state === state);
    return state === "superseded" ? `superseded epoch=${known.epoch}` : state;
  },
  async get_engine(command) {
    return engineLine(await new Registry(dial(command)).getEngine(command.engine));
  },
  async refuse(command) {
    const answer = await clientOf(RegistryService, dial(command)).getEngine({ engine: command.engine });
    return engineLine(answer.engine!);
  },
  async resolve_ranks(command) {
    const request = { engine: command.engine, role: Role[command.role], waitReady: command.wait_ready, selectors: [{}] };
    return engineLine(await new Registry(dial(command)).resolveRanks(request, { timeoutMs: command.timeout_ms }));
  },
  async list_engines(command) {
    return joined((await new Registry(dial(command)).listEngines()).engines.map(headLine), ", ");
  },
  watch_engines(command) {
    const watch = { ending: new AbortController(), engines: new Map<string, Engine>(), complete: false };
    watches.set(command.as, watch);
    void (async () => {
      for await (const message of new Registry(dial(command)).watchEngines({}, watch.ending.signal)) {
        for (const { engine } of message.changes) {
          watch.engines.set(engine!.name, engine!);
        }
        watch.complete ||= message.stateComplete;
      }
    })().catch(() => undefined);
    return "watching";
  },
  async until_engine({ as, engine, ranks }) {
    const watch = watches.get(as)!;
    await until(() => watch.complete && (watch.engines.get(engine)?.registeredRanks ?? 0) === ranks);
    return ranks === 0 ? `${engine} gone` : headLine(watch.engines.get(engine)!);
  },
  follow(command) {
    const followed = new Followed();
    followers.set(command.as, followed);
    const { signal } = followed.ending;
    void (async () => {
      for await (const item of followEvents(clientOf(EventService, dial(command)), followed.cache, { signal })) {
        followed.hear(item);
      }
    })();
    return "following";
  },
  async until_current({ as, next }) {
    const followed = followers.get(as)!;
    await until(() => followed.isCurrentAt(BigInt(next)));
    return followed.contents();
  },
  async until_failed({ as }) {
    const followed = followers.get(as)!;
    await until(() => followed.failures > followed.told);
    return `failed ${followed.contents()}`;
  },
  counts({ as }) {
    const { snapshots, logs, different } = followers.get(as)!;
    return `snapshots=${snapshots} logs=${logs.size} different=${different}`;
  },
  holds({ as, hash, medium }) {
    return `${followers.get(as)!.cache.holds(BigInt(hash), medium)}`;
  },
  async close({ as }) {
    await registrations.get(as)?.registration.close();
    watches.get(as)?.ending.abort();
    followers.get(as)?.ending.abort();
    return "closed";
  },
  async score(command) {
    const answer = await new Index(dial(command)).score({
      prompts: [promptOf(command)],
      engines: command.engines ?? [],
      maxScores: command.max_scores ?? 0,
    });
    return joined(answer.prompts[0]!.scores.map(scoreLine), ", ");
  },
  async plan(command) {
    const prompt = { prompt: promptOf(command), engines: command.engines ?? [] };
    const answer = await new Index(dial(command)).plan({ prompts: [prompt], maxPlacements: command.max_placements ?? 0 });
    return joined(answer.plans[0]!.placements.map(placementLine), ", ");
  },
  async lookup(command) {
    const found = await new Prefetch(dial(command)).lookup(pagesOf(command.first_token, command.tokens));
    const counts = `device=${found.devicePages} host=${found.hostPages} storage=${found.storagePages}`;
    return `asked=${found.askedPages} ${counts} page=${found.pageTokens}`;
  },
  async start_prefetch(command) {
    const prefetch = new Prefetch(dial(command));
    const pages = pagesOf(command.first_token, command.tokens);
    const { operationId } = await prefetch.startPrefetch({ pages, requestId: command.request_id });
    operations.set(command.as, { prefetch, id: operationId });
    return "started";
  },
  async until_ended({ as }) {
    const { prefetch, id } = operations.get(as)!;
    return operationLine(await prefetch.untilEnded(id));
  },
  async terminate_prefetch({ as }) {
    const { prefetch, id } = operations.get(as)!;
    return operationLine(await prefetch.terminatePrefetch(id));
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  console.log(await answer(JSON.parse(line) as Command));
}
process.exit(0);

async function answer(command: Command): Promise<string> {
  const late = new Promise<string>((done) => setTimeout(done, command.within_ms ?? USUAL_MS, "timeout").unref());
  try {
    return await Promise.race([acts[command.op]!(command), late]);
  } catch (error) {
    return refusal(failureOf(error));
  }
}

function promptOf({ hashes, model }: Command) {
  return { prefix: { case: "blockHashes", value: { values: hashes } }, model: model ?? "" } as const;
}

function dial({ address, ca, secret }: Pick<Command, "address" | "ca" | "secret">): Transport {
  let known = transports.get(address);
  if (known === undefined) {
    const tls = ca === undefined ? {} : { tls: { ca: readFileSync(ca) } };
    known = connect(address, { ...tls, ...(secret === undefined ? {} : { secret }) });
    transports.set(address, known);
  }
  return known;
}

async function until(condition: () => boolean): Promise<void> {
  while (!condition()) {
    await new Promise((done) => setTimeout(done, LOOK_MS));
  }
}
