/** Calls that are made again where a refusal says that they may be. */
import { Code } from "@connectrpc/connect";

import { EndlessList, failureOf, mayRepeat } from "./errors.js";
import { sleep } from "./silence.js";

/** How long a call and its repeats may take, in milliseconds. */
export interface Within {
  timeoutMs?: number;
}

const USUAL_MS = 10_000;
const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 2_000;
export const PAGE_SIZE = 1_000;

/**
 * An idempotent call, again while the server is away or asks for time, until `timeoutMs` are over: 10 s unless given, as a host that
 * vanished closes nothing. Throws the last error.
 */
export async function ask<Response>(
  call: (options: { timeoutMs: number }) => Promise<Response>,
  { timeoutMs = USUAL_MS }: Within = {},
): Promise<Response> {
  const end = performance.now() + timeoutMs;
  let longest = FIRST_PAUSE_MS;
  for (;;) {
    try {
      return await call({ timeoutMs: Math.max(1, Math.round(end - performance.now())) });
    } catch (error) {
      const failure = failureOf(error);
      const pause = Math.max(Math.random() * longest, failure.retryAfterMs ?? 0);
      // An attempt that has a shorter time of its own is not the last.
      const again = mayRepeat(failure) || failure.code === Code.DeadlineExceeded;
      if (!again || performance.now() + pause >= end) {
        throw error;
      }
      longest = Math.min(2 * longest, LONGEST_PAUSE_MS);
      await sleep(pause);
    }
  }
}

/**
 * Asks for one page of a list after the other, the first by no token; `ask` gives the token of the next. Throws EndlessList where the
 * server names a page that it named before.
 */
export async function eachPage(ask: (pageToken: string) => Promise<string>): Promise<void> {
  const named = new Set<string>();
  for (let pageToken = await ask(""); pageToken !== ""; pageToken = await ask(pageToken)) {
    if (named.has(pageToken)) {
      throw new EndlessList();
    }
    named.add(pageToken);
  }
}
