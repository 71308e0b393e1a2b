/** Who serves what: questions to a registry, and rows of this process there. */
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Client, Transport } from "@connectrpc/connect";

import { clientOf } from "./connect.js";
import type { Role } from "./gen/kvgrpc/v1/common_pb.js";
import {
  type Engine,
  RegistryService,
  type ResolveRanksRequestSchema,
  type WatchEnginesRequestSchema,
  type WatchEnginesResponse,
} from "./gen/kvgrpc/v1/registry_service_pb.js";
import { Registration, type RowInit } from "./registration.js";
import { ask, eachPage, PAGE_SIZE, type Within } from "./repeat.js";
import { untilSilent } from "./silence.js";

/** A registry says something each 5 s. */
const SILENCE_MS = 15_000;

/** Engines by name; `warmingUp`: the registry started a moment ago, and there may be more. */
export interface Engines {
  engines: Engine[];
  warmingUp: boolean;
}

/** Reads are repeated while the registry is away, until their time is over. */
export class Registry {
  readonly #client: Client<typeof RegistryService>;
  readonly #replicas: Client<typeof RegistryService>[];

  /** `replicas` of the same registry: a registration goes on at the next one where one does not answer. */
  constructor(transport: Transport, ...replicas: Transport[]) {
    this.#client = clientOf(RegistryService, transport);
    this.#replicas = [this.#client, ...replicas.map((replica) => clientOf(RegistryService, replica))];
  }

  /**
   * Registers rows, again while the registry is away or asks for time, and then looks after them until `close`. Where the failure says
   * STALE_EPOCH, an epoch above its metadata's currentEpoch would be taken.
   */
  register(rows: readonly RowInit[], within: Within = {}): Promise<Registration> {
    return Registration.begin(this.#replicas, rows, within);
  }

  /** One engine with all of its rows. */
  async getEngine(engine: string, within: Within = {}): Promise<Engine> {
    let whole: Engine | undefined;
    await eachPage(async (pageToken) => {
      const page = await ask((options) => this.#client.getEngine({ engine, pageSize: PAGE_SIZE, pageToken }, options), within);
      if (whole === undefined) {
        whole = page.engine!;
      } else {
        whole.rows.push(...(page.engine?.rows ?? []));
      }
      return page.nextPageToken;
    });
    return whole!;
  }

  /** All engines, ordered by name. */
  async listEngines({ role, includeRows = false, ...within }: { role?: Role; includeRows?: boolean } & Within = {}): Promise<Engines> {
    const found: Engines = { engines: [], warmingUp: false };
    await eachPage(async (pageToken) => {
      const request = { includeRows, pageSize: PAGE_SIZE, pageToken, ...(role === undefined ? {} : { role }) };
      const page = await ask((options) => this.#client.listEngines(request, options), within);
      found.engines.push(...page.engines);
      found.warmingUp ||= page.warmingUp;
      return page.nextPageToken;
    });
    return found;
  }

  /** The engine with the rows that any of the selectors fits; with `waitReady` once it is READY. */
  async resolveRanks(request: MessageInitShape<typeof ResolveRanksRequestSchema>, within: Within = {}): Promise<Engine> {
    return (await ask((options) => this.#client.resolveRanks(request, options), within)).engine!;
  }

  /**
   * The full state of the registry, then what changes. It is not resumed by itself: watch again where it ends or throws, which it does
   * too where the registry says nothing for 15 s (a message comes each 5 s).
   */
  watchEngines(
    request: MessageInitShape<typeof WatchEnginesRequestSchema> = {},
    signal?: AbortSignal,
  ): AsyncGenerator<WatchEnginesResponse> {
    return untilSilent((ending) => this.#client.watchEngines(request, { signal: ending }), SILENCE_MS, signal);
  }
}
