/** Who holds the beginnings of requests, as an index (`kvgrpc serve index`) says. */
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Client, Transport } from "@connectrpc/connect";

import { clientOf } from "./connect.js";
import {
  IndexService,
  type IndexSource,
  type IndexSourceState,
  type PlanRequestSchema,
  type PlanResponse,
  type ScoreRequestSchema,
  type ScoreResponse,
} from "./gen/kvgrpc/v1/index_service_pb.js";
import { ask, eachPage, PAGE_SIZE, type Within } from "./repeat.js";

/** The caches that an index follows, how many are in which state, and what it cannot follow. */
export interface Sources {
  sources: IndexSource[];
  counts: Map<IndexSourceState, number>;
  notFollowed: string[];
}

/** Calls are repeated while it is away, until their time is over. */
export class Index {
  readonly #client: Client<typeof IndexService>;

  constructor(transport: Transport) {
    this.#client = clientOf(IndexService, transport);
  }

  /** Of each prompt, how many of its leading blocks each cache holds. */
  score(request: MessageInitShape<typeof ScoreRequestSchema>, within: Within = {}): Promise<ScoreResponse> {
    return ask((options) => this.#client.score(request, options), within);
  }

  /**
   * Of each request, where to run it, and from whom to pull which part of its prompt. With `reserve` a repeated call may count a
   * request twice, for the second until its engine tells what it has to do.
   */
  plan(request: MessageInitShape<typeof PlanRequestSchema>, within: Within = {}): Promise<PlanResponse> {
    return ask((options) => this.#client.plan(request, options), within);
  }

  /** Those in one of these states; none: in any. */
  async listSources({ states = [], ...within }: { states?: IndexSourceState[] } & Within = {}): Promise<Sources> {
    const found: Sources = { sources: [], counts: new Map(), notFollowed: [] };
    await eachPage(async (pageToken) => {
      const page = await ask((options) => this.#client.listSources({ states, pageSize: PAGE_SIZE, pageToken }, options), within);
      found.sources.push(...page.sources);
      found.notFollowed = page.notFollowed;
      found.counts = new Map(page.counts.map((count) => [count.state, count.sources]));
      return page.nextPageToken;
    });
    return found;
  }
}
