/** What a Watch tells, one item after the other. */
import type { Failure } from "./errors.js";
import type { EventBatch, KVEvent } from "./events.js";
import type { StateDigest } from "./gen/kvgrpc/v1/event_service_pb.js";

export type WatchItem =
  /** `fresh`: whatever was known before is void (first contact, another log, reading from the oldest batch). */
  | { kind: "begin"; log: string; sequence: bigint; fresh: boolean }
  /**
   * A part of the state. Index 0 begins one, from empty on. Once `last`, all before `nextSequence` is in, and comes to `state`;
   * until then what was known is old, and was true: show it until then.
   */
  | { kind: "snapshot"; log: string; nextSequence: bigint; events: KVEvent[]; index: number; last: boolean; state: StateDigest | undefined }
  | { kind: "batch"; log: string; sequence: bigint; batch: EventBatch }
  /** What was known is no state of the cache any more (another log is current, a digest differs): forget it now. */
  | { kind: "void"; log: string; cause: string }
  /** A payload that is no batch: forget what is known, or ask again. Of a snapshot: forget what that said so far. */
  | { kind: "unreadable"; log: string; sequence: bigint; cause: string }
  /** The publisher lost these; AllBlocksCleared follows. */
  | { kind: "dropped"; log: string; firstSequence: bigint; lastSequence: bigint; cause: string }
  /**
   * All before `nextSequence` was told; the publisher has `lag` batches beyond: 0, but under load. `state`: the publisher's digest
   * of the same or an earlier sequence, if it keeps one.
   */
  | { kind: "current"; log: string; nextSequence: bigint; lag: bigint; state: StateDigest | undefined }
  /**
   * A call broke, was refused or said what cannot be; another one follows after a pause. What is known stays, unless "void" came
   * before. `lasting`: time alone can hardly mend it (a wrong name, no permission): a person should hear of it.
   */
  | { kind: "failed"; log: string; failure: Failure; lasting: boolean };
