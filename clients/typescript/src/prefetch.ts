/** The hierarchical cache of a rank: what is where, and pages that move between its storage and its host. */
import { randomUUID } from "node:crypto";

import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Client, Transport } from "@connectrpc/connect";

import { clientOf } from "./connect.js";
import {
  type CacheOperation,
  type GetCacheInfoResponse,
  type LookupResponse,
  type PinPagesRequestSchema,
  type PinPagesResponse,
  PrefetchService,
  type PromptPagesSchema,
  type PurgePagesRequestSchema,
  type PurgePagesResponse,
  type StartBackupRequestSchema,
  type StartPrefetchRequestSchema,
  type WatchOperationsResponse,
} from "./gen/kvgrpc/v1/prefetch_service_pb.js";
import { ask, eachPage, PAGE_SIZE, type Within } from "./repeat.js";
import { untilSilent } from "./silence.js";

/** A message comes each second. */
const SILENCE_MS = 5_000;

type Pages = MessageInitShape<typeof PromptPagesSchema>;

/** Of the rank with pp = cp = tp = 0. Calls are repeated while it is away, until their time is over. */
export class Prefetch {
  readonly #client: Client<typeof PrefetchService>;

  constructor(transport: Transport) {
    this.#client = clientOf(PrefetchService, transport);
  }

  /** How many leading pages are on device, host and in storage. */
  lookup(pages: Pages, { withoutStorage = false, ...within }: { withoutStorage?: boolean } & Within = {}): Promise<LookupResponse> {
    return ask((options) => this.#client.lookup({ pages, withoutStorage }, options), within);
  }

  /** Begins to bring pages from storage to the host. Without a `requestId` it gets one, so that a repeat begins nothing twice. */
  async startPrefetch(request: MessageInitShape<typeof StartPrefetchRequestSchema>, within: Within = {}): Promise<CacheOperation> {
    const named = { ...request, requestId: request.requestId || randomUUID() };
    return (await ask((options) => this.#client.startPrefetch(named, options), within)).operation!;
  }

  /** Begins to write the leading pages that the host has to storage; otherwise as `startPrefetch`. */
  async startBackup(request: MessageInitShape<typeof StartBackupRequestSchema>, within: Within = {}): Promise<CacheOperation> {
    const named = { ...request, requestId: request.requestId || randomUUID() };
    return (await ask((options) => this.#client.startBackup(named, options), within)).operation!;
  }

  /**
   * The latest states of operations (none named: of all), from the present on. It ends when those that are named have ended; it throws
   * where the rank is away: watch again.
   */
  watchOperations(operationIds: readonly string[] = [], signal?: AbortSignal): AsyncGenerator<WatchOperationsResponse> {
    const request = { operationIds: [...operationIds] };
    return untilSilent((ending) => this.#client.watchOperations(request, { signal: ending }), SILENCE_MS, signal);
  }

  /** Watches one operation to its end, also over breaks. */
  untilEnded(operationId: string, within: Within = {}): Promise<CacheOperation> {
    return ask(async ({ timeoutMs }) => {
      let last: CacheOperation | undefined;
      for await (const message of this.watchOperations([operationId], AbortSignal.timeout(timeoutMs))) {
        last = message.operations.at(-1) ?? last;
      }
      return last!;
    }, within);
  }

  /** Cuts an operation short: it as it is now, and whether it is quiescent. */
  async terminatePrefetch(operationId: string, within: Within = {}): Promise<CacheOperation> {
    return (await ask((options) => this.#client.terminatePrefetch({ operationId }, options), within)).operation!;
  }

  /** Prefetches and backups in the order in which they began. */
  async listOperations({ openOnly = false, ...within }: { openOnly?: boolean } & Within = {}): Promise<CacheOperation[]> {
    const found: CacheOperation[] = [];
    await eachPage(async (pageToken) => {
      const page = await ask((options) => this.#client.listOperations({ openOnly, pageSize: PAGE_SIZE, pageToken }, options), within);
      found.push(...page.operations);
      return page.nextPageToken;
    });
    return found;
  }

  /** What the cache is made of, and how full its tiers are. */
  getCacheInfo(within: Within = {}): Promise<GetCacheInfoResponse> {
    return ask((options) => this.#client.getCacheInfo({}, options), within);
  }

  /** Keeps the leading pages that device and host have from eviction. */
  pinPages(request: MessageInitShape<typeof PinPagesRequestSchema>, within: Within = {}): Promise<PinPagesResponse> {
    return ask((options) => this.#client.pinPages(request, options), within);
  }

  /** Drops pages that nobody uses. */
  purgePages(request: MessageInitShape<typeof PurgePagesRequestSchema>, within: Within = {}): Promise<PurgePagesResponse> {
    return ask((options) => this.#client.purgePages(request, options), within);
  }
}
