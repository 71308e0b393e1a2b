/** Streams that say nothing any more, and pauses that a signal ends. */
import { Silence } from "./errors.js";

/**
 * What a call says, until it ends, or is ended: by `signal`, where nothing came for so long while somebody waited, or where nobody
 * reads on.
 */
export async function* untilSilent<Message>(
  call: (ending: AbortSignal) => AsyncIterable<Message>,
  milliseconds: number,
  signal?: AbortSignal,
): AsyncGenerator<Message> {
  const aborter = new AbortController();
  const end = () => aborter.abort();
  let silence: Silence | undefined;
  const giveUp = () => {
    silence = new Silence(milliseconds);
    // The connection is left with it: see connect.
    aborter.abort(silence);
  };
  signal?.addEventListener("abort", end, { once: true });
  let timer = setTimeout(giveUp, milliseconds);
  try {
    for await (const message of call(aborter.signal)) {
      clearTimeout(timer);
      yield message;
      timer = setTimeout(giveUp, milliseconds);
    }
  } catch (error) {
    throw silence ?? error;
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", end);
    // Whoever leaves the loop leaves the call: the library goes on with one that nobody reads.
    end();
  }
}

/** Ends early where the signal aborts. */
export function sleep(milliseconds: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(done, signal?.aborted ? 0 : milliseconds);
    signal?.addEventListener("abort", done, { once: true });
    function done(): void {
      clearTimeout(timer);
      signal?.removeEventListener("abort", done);
      resolve();
    }
  });
}
