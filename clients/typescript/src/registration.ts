/** Rows of this process at a registry, for as long as it lives and whatever the registry does. */
import { create, type MessageInitShape, toBinary } from "@bufbuild/protobuf";
import { type Client, Code, ConnectError } from "@connectrpc/connect";

import { failureOf } from "./errors.js";
import type { Duration } from "@bufbuild/protobuf/wkt";
import type { RankId } from "./gen/kvgrpc/v1/common_pb.js";
import { ErrorReason } from "./gen/kvgrpc/v1/error_reason_pb.js";
import { type RankRow, RankRowSchema, type RegistryService } from "./gen/kvgrpc/v1/registry_service_pb.js";
import { ask, type Within } from "./repeat.js";
import { sleep, untilSilent } from "./silence.js";

/** registered: its leases are renewed; retrying: it comes back by itself; superseded: a newer incarnation has taken over every row. */
export type RegistrationState = "registered" | "retrying" | "superseded" | "closed";

export type RowInit = MessageInitShape<typeof RankRowSchema>;

/** A newer incarnation of `rank` took its row over: that rank was replaced and must stop. */
export interface Supersession {
  rank: RankId | undefined;
  epoch: bigint;
}

const REGISTER_MS = 5_000;
const DEREGISTER_MS = 1_000;
const LONGEST_PAUSE_MS = 5_000;
const MOST_ROWS = 1_024;
const MOST_BYTES = 1 << 20;
/** Whatever a registry says: it is asked each third of it. */
const SHORTEST_TTL_MS = 300;
const USUAL_TTL_MS = 10_000;
const LONGEST_TTL_MS = 600_000;

/**
 * It renews the leases at a third of their time, and registers again when the registry does not know a lease, was restarted, or did not
 * answer. `Registry.register` makes one.
 */
export class Registration {
  /** Called for each row that was taken over. */
  onSuperseded: (gone: Supersession) => void = () => undefined;
  #replicas: Client<typeof RegistryService>[];
  #rows: RankRow[];
  #leases = new Map<string, RankRow>();
  #ttl = USUAL_TTL_MS;
  #state: RegistrationState = "registered";
  #error: unknown;
  #attempt = 0;
  readonly #ending = new AbortController();
  #ended: Promise<void> = Promise.resolve();

  /** For `Registry.register`. */
  static async begin(
    replicas: readonly Client<typeof RegistryService>[],
    rows: readonly RowInit[],
    within: Within,
  ): Promise<Registration> {
    const registration = new Registration(replicas, rows);
    try {
      await ask(async ({ timeoutMs }) => {
        try {
          await registration.#register(registration.#rows, Math.min(timeoutMs, REGISTER_MS));
        } catch (error) {
          registration.#hangUp();
          throw error;
        }
      }, within);
    } catch (error) {
      await registration.close();
      throw error;
    }
    registration.#ended = registration.#lookAfter();
    return registration;
  }

  private constructor(replicas: readonly Client<typeof RegistryService>[], rows: readonly RowInit[]) {
    this.#replicas = [...replicas];
    this.#rows = rows.map((row) => create(RankRowSchema, row));
  }

  get state(): RegistrationState {
    return this.#state;
  }

  /** Why it last failed; undefined: it never did. */
  get error(): unknown {
    return this.#error;
  }

  /** Stops, and deregisters within a second if the registry answers; otherwise the leases run out. */
  async close(): Promise<void> {
    this.#state = "closed";
    this.#ending.abort();
    await this.#ended;
    const ranks = this.#rows.flatMap((row) => (row.rank === undefined ? [] : [row.rank]));
    this.#rows = [];
    for (let first = 0; first < ranks.length; first += MOST_ROWS) {
      const some = ranks.slice(first, first + MOST_ROWS);
      await this.#client.deregister({ ranks: some }, { timeoutMs: DEREGISTER_MS }).catch(() => undefined);
    }
  }

  get #client(): Client<typeof RegistryService> {
    return this.#replicas[0]!;
  }

  async #lookAfter(): Promise<void> {
    const { signal } = this.#ending;
    while (!signal.aborted && this.#rows.length > 0) {
      try {
        await this.#hold();
      } catch (error) {
        const { aborted } = signal;
        if (aborted) {
          return;
        }
        const failure = failureOf(error);
        this.#error = error;
        if (failure.reason === ErrorReason.STALE_EPOCH) {
          this.#supersede(failure.metadata);
          continue;
        }
        this.#state = "retrying";
        await sleep(this.#pause(failure.retryAfterMs ?? 0), signal);
        this.#hangUp();
        this.#attempt += 1;
      }
    }
  }

  /** Registers where that is needed, then renews until something fails, which it throws. */
  async #hold(): Promise<void> {
    const { signal } = this.#ending;
    if (this.#state !== "registered") {
      await this.#register(this.#rows, REGISTER_MS);
      this.#state = "registered";
    }
    // A request each third of the time to live, and its answer within another, but a second at least.
    const silence = this.#ttl / 3 + Math.max(this.#ttl / 3, 1_000);
    const answers = untilSilent((ending) => this.#client.keepAlive(this.#renewals(ending), { signal: ending }), silence, signal);
    for await (const answer of answers) {
      this.#ttl = ttlOf(answer.ttl);
      // Not before: where every renewal is refused, ranks that register anew at once would be a storm.
      this.#attempt = 0;
      const unknown = answer.unknownLeaseIds.flatMap((lease) => this.#leases.get(lease) ?? []);
      this.#dropLeases(unknown);
      await this.#register(unknown, REGISTER_MS);
    }
    throw new ConnectError("the registry ended the stream", Code.Unavailable);
  }

  async *#renewals(ending: AbortSignal): AsyncGenerator<{ leaseIds: string[] }> {
    while (!ending.aborted) {
      yield { leaseIds: [...this.#leases.keys()] };
      await sleep(this.#ttl / 3, ending);
    }
  }

  async #register(rows: readonly RankRow[], timeoutMs: number): Promise<void> {
    let first = 0;
    while (first < rows.length) {
      const some = fitting(rows.slice(first));
      const answer = await this.#client.register({ rows: some }, { timeoutMs });
      this.#ttl = ttlOf(answer.ttl);
      this.#dropLeases(some);
      answer.leases.forEach((lease, position) => this.#leases.set(lease.leaseId, some[position]!));
      first += some.length;
    }
  }

  #supersede(metadata: Record<string, string>): void {
    const named = this.#rows.filter((row) => nameOf(row) === metadata["rank"]);
    const gone = named.length > 0 ? named : this.#rows;
    this.#rows = this.#rows.filter((row) => !gone.includes(row));
    this.#dropLeases(gone);
    this.#state = this.#rows.length > 0 ? "retrying" : "superseded";
    for (const row of gone) {
      this.onSuperseded({ rank: row.rank?.rank, epoch: BigInt(metadata["currentEpoch"] ?? 0) });
    }
  }

  #dropLeases(rows: readonly RankRow[]): void {
    for (const [lease, row] of this.#leases) {
      if (rows.includes(row)) {
        this.#leases.delete(lease);
      }
    }
  }

  /** Wide, because all ranks of a cluster lose their registry at the same moment. */
  #pause(asked: number): number {
    const first = Math.min(1_000, this.#ttl / 10);
    const pause = Math.min(first * 2 ** Math.min(this.#attempt, 16), this.#ttl / 3, LONGEST_PAUSE_MS);
    return Math.min(asked, LONGEST_TTL_MS) + pause * (0.1 + 0.9 * Math.random());
  }

  /** The next attempt asks the next replica. */
  #hangUp(): void {
    this.#replicas.push(this.#replicas.shift()!);
  }
}

/** The first rows that one request may have; at least one. */
function fitting(rows: readonly RankRow[]): RankRow[] {
  let bytes = 0;
  const most = rows.findIndex((row, position) => {
    bytes += toBinary(RankRowSchema, row).length;
    return position > 0 && (position === MOST_ROWS || bytes > MOST_BYTES);
  });
  return rows.slice(0, most < 0 ? rows.length : most);
}

/** As a registry's refusals call a rank. */
function nameOf({ rank }: RankRow): string {
  const { engine, dp, pp, cp, tp } = rank?.rank ?? {};
  return `${engine}/dp${dp}/pp${pp}/cp${cp}/tp${tp}`;
}

/** In milliseconds, within reason; the usual one where the registry names none. */
function ttlOf(told: Duration | undefined): number {
  const milliseconds = Number(told?.seconds ?? 0) * 1_000 + (told?.nanos ?? 0) / 1e6;
  return milliseconds > 0 ? Math.min(Math.max(milliseconds, SHORTEST_TTL_MS), LONGEST_TTL_MS) : USUAL_TTL_MS;
}
