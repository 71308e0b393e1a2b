/** Several indexes of one fleet: who routes asks one of them, and waits for none. */
import type { MessageInitShape } from "@bufbuild/protobuf";
import { type Client, Code, type Transport } from "@connectrpc/connect";

import { clientOf } from "./connect.js";
import { failureOf, mayRepeat } from "./errors.js";
import {
  IndexService,
  type PlanRequestSchema,
  type PlanResponse,
  type ScoreRequestSchema,
  type ScoreResponse,
} from "./gen/kvgrpc/v1/index_service_pb.js";

/** Of a router: in the path of every request. */
const USUAL_WAIT_MS = 20;
/** Those that are not asked are looked at so often, and so long. */
const LOOK_INTERVAL_MS = 1_000;

interface OneOf {
  client: Client<typeof IndexService>;
  /** When it last did not answer, and when it was last looked at. */
  failedAt: number;
  lookedAt: number;
}

/**
 * A question goes to the index that failed longest ago, and where that refuses at once to the next. After `waitMs` there is no answer
 * (undefined), and the next question goes elsewhere. It throws what no other index would answer either.
 */
export class Indexes {
  readonly #indexes: OneOf[];
  readonly #waitMs: number;
  /** Questions that nobody answered in time. */
  unanswered = 0;

  constructor(transports: readonly Transport[], { waitMs = USUAL_WAIT_MS }: { waitMs?: number } = {}) {
    const one = (transport: Transport) => ({ client: clientOf(IndexService, transport), failedAt: -Infinity, lookedAt: -Infinity });
    this.#indexes = transports.map(one);
    this.#waitMs = waitMs;
  }

  /** Who holds the beginnings of requests; undefined: nobody answered in time. */
  score(request: MessageInitShape<typeof ScoreRequestSchema>): Promise<ScoreResponse | undefined> {
    return this.#first((client, options) => client.score(request, options));
  }

  /** Where to run requests, and from whom to pull which part of their prompts; undefined as of `score`. */
  plan(request: MessageInitShape<typeof PlanRequestSchema>): Promise<PlanResponse | undefined> {
    return this.#first((client, options) => client.plan(request, options));
  }

  async #first<Response>(
    ask: (client: Client<typeof IndexService>, options: { timeoutMs: number }) => Promise<Response>,
  ): Promise<Response | undefined> {
    const end = performance.now() + this.#waitMs;
    for (const index of this.#inTurn()) {
      const left = end - performance.now();
      if (left <= 0) {
        break;
      }
      try {
        return await ask(index.client, { timeoutMs: Math.max(1, Math.round(left)) });
      } catch (error) {
        const failure = failureOf(error);
        if (!mayRepeat(failure) && failure.code !== Code.DeadlineExceeded) {
          throw error;
        }
        index.failedAt = performance.now();
      }
    }
    this.unanswered += 1;
    return undefined;
  }

  /** The others connect meanwhile: nobody has time for that when the first one dies. */
  #inTurn(): OneOf[] {
    const inTurn = [...this.#indexes].sort((one, other) => one.failedAt - other.failedAt || 0);
    const now = performance.now();
    for (const other of inTurn.slice(1).filter(({ lookedAt }) => now - lookedAt >= LOOK_INTERVAL_MS)) {
      other.lookedAt = now;
      other.client.listSources({ pageSize: 1 }, { timeoutMs: LOOK_INTERVAL_MS }).catch(() => undefined);
    }
    return inTurn;
  }
}
