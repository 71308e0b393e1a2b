/** What failed and why, out of any error that a call threw. */
import { Code, ConnectError } from "@connectrpc/connect";

import { ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { ErrorReason } from "./gen/kvgrpc/v1/error_reason_pb.js";

const DOMAIN = "kvgrpc.dev";
const PREFIX = "ERROR_REASON_";

/** A call from which nothing came although something was due: whoever is there is frozen, or gone. */
export class Silence extends ConnectError {
  constructor(milliseconds: number) {
    super(`nothing came for ${milliseconds / 1000} s`, Code.DeadlineExceeded);
  }
}

/** A server names the pages of a list over and over. */
export class EndlessList extends ConnectError {
  constructor() {
    const info = { reason: `${PREFIX}INTERNAL`, domain: DOMAIN };
    const text = "the server names a page that it named before: its list has no end";
    super(text, Code.Internal, undefined, [{ desc: ErrorInfoSchema, value: info }]);
  }
}

export interface Failure {
  code: Code;
  /** UNSPECIFIED: the status came from the library or the network, or from a newer server. docs/errors.md has the table. */
  reason: ErrorReason;
  /** The reason as text, also one that this version does not know; "" where there is none. */
  reasonName: string;
  message: string;
  metadata: Record<string, string>;
  /** After how many milliseconds the same call may be repeated; undefined: the server did not say. */
  retryAfterMs: number | undefined;
}

export function failureOf(error: unknown): Failure {
  const connect = ConnectError.from(error);
  const info = connect.findDetails(ErrorInfoSchema).find((detail) => detail.domain === DOMAIN);
  const retry = connect.findDetails(RetryInfoSchema)[0]?.retryDelay;
  const name = info?.reason.startsWith(PREFIX) ? info.reason.slice(PREFIX.length) : "";
  const reasons = ErrorReason as unknown as Record<string, ErrorReason | undefined>;
  return {
    code: connect.code,
    reason: reasons[name] ?? ErrorReason.UNSPECIFIED,
    reasonName: name,
    message: connect.rawMessage,
    metadata: info?.metadata ?? {},
    retryAfterMs: retry === undefined ? undefined : Number(retry.seconds) * 1000 + retry.nanos / 1e6,
  };
}

/** Whether the same call may succeed later. */
export function mayRepeat(failure: Failure): boolean {
  return failure.code === Code.Unavailable || failure.retryAfterMs !== undefined;
}
