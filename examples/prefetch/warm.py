"""A router that warms a cache: the pages of a prompt are on their way before its request is.

python warm.py HOST:PORT < prompt.json        # a JSON list of tokens
"""

import json
import sys
import time

from kvgrpc.client import SyncClient
from kvgrpc.v1 import prefetch_service_pb2 as pb

WORTH_PAGES = 1  # fewer than so many pages more are computed faster than they are fetched
SECONDS = 2.0  # for which the request may be held back


def warm(engine: SyncClient, tokens: list[int], request_id: str) -> int:
    """Leading tokens that the engine need not compute. Call it when the request comes, and again after a lost reply:
    the same request_id begins nothing twice."""
    prompt = pb.PromptPages(tokens=tokens)
    found = engine.lookup(prompt)
    if found.storage_pages - found.host_pages < WORTH_PAGES:
        return found.host_pages * found.page_tokens
    operation = engine.start_prefetch(prompt, request_id=request_id, timeout=SECONDS, tenant="router")
    for message in engine.watch_operations([operation.operation_id]):
        for each in message.operations:
            operation = each
    # Declined or ended early is an answer: what is in place by now is usable, the rest is computed.
    return max(operation.completed_pages, operation.covered_pages, found.host_pages) * found.page_tokens


def main() -> None:
    tokens = json.load(sys.stdin)
    began = time.monotonic()
    with SyncClient(sys.argv[1]) as engine:
        ready = warm(engine, tokens, request_id="request-1")
    milliseconds = (time.monotonic() - began) * 1000
    print(f"{ready} of {len(tokens)} tokens are on the engine's host or device, after {milliseconds:.0f} ms")


if __name__ == "__main__":
    main()
