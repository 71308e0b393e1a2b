"""A small router over kvgrpc: it asks an index where to run each request, has pages pulled, and hands it to ``send``.

python router.py --registry HOST:PORT --index HOST:PORT,HOST:PORT < requests.jsonl    # a line each: {"tokens": [1, 2]}

Of several indexes any may be away. Where none has answered after 20 ms the request goes to the next engine in turn.

What is yours to add: how a request reaches an engine (``send``) and how its answer comes back.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvgrpc.client import SyncIndexes, SyncPulls
from kvgrpc.v1 import index_service_pb2, prefetch_service_pb2

AT_ONCE = 32  # requests on their way
ENGINES = 256  # that are remembered for when no index answers
START_SECONDS = 5.0  # for which the first question may wait
PULL_SECONDS = 5.0  # for which a request may be held back; what has come by then is used, the rest is computed


class Router:
    """Thread-safe. ``registry`` says where engines are, ``indexes`` what they hold and how busy they are."""

    def __init__(self, registry: str, indexes: Sequence[str], model: str = "") -> None:
        self._pulls, self._indexes, self._model = SyncPulls(registry, None, PULL_SECONDS), SyncIndexes(indexes), model
        # All that could run a request, as of the last plan.
        self._living: Sequence[index_service_pb2.Placement] = ()
        self._turns = itertools.count()

    @property
    def unplanned(self) -> int:
        """Requests that went where their turn was, because no index answered in time."""
        return self._indexes.unanswered

    def plan(self, tokens: Sequence[int], engines: Sequence[str] = ()) -> index_service_pb2.Placement | None:
        """Where to run it and what to pull first; None where no engine is known to live."""
        answer = self._indexes.plan(self._question(tokens, engines))
        if answer is not None:
            self._living = answer.plans[0].placements
            return self._living[0] if self._living else None
        living = self._living
        return in_turn(living[next(self._turns) % len(living)]) if living else None

    def learn(self) -> None:
        """Who lives, ahead of the first request: connecting takes longer than a request may wait."""
        question = self._question([], ())
        question.reserve = False
        answer = self._indexes.plan(question, START_SECONDS)
        if answer is not None:
            self._living = answer.plans[0].placements

    def prefix(self, tokens: Sequence[int]) -> index_service_pb2.ScorePrompt:
        """What a request begins with, as its engines name it: here SGLang's. Beside vLLM's say it for those too, in
        ``other_kinds`` of the question."""
        return index_service_pb2.ScorePrompt(sglang=index_service_pb2.SglangPrompt(token_ids=tokens), model=self._model)

    def pull(self, tokens: Sequence[int], at: index_service_pb2.Placement) -> int:
        """Pages that lie at the engine once its pull has ended, however that was: nothing here fails the request."""
        came = self._pulls.pull(at, prefetch_service_pb2.PromptPages(tokens=tokens))
        if came.failure is not None:
            print(f"a pull to {at.engine}: {came.failure.message}", file=sys.stderr)
        return came.pages

    def send(self, tokens: Sequence[int], at: index_service_pb2.Placement) -> None:
        """Hands the request to the engine: yours to write."""

    def serve(self, tokens: Sequence[int]) -> dict[str, object]:
        """One request, and what was decided about it."""
        began = time.monotonic()
        at = self.plan(tokens)
        if at is None:
            return {"engine": None, "pulled_from": None, "blocks": 0, "why": "no engine is known to live"}
        blocks = self.pull(tokens, at) if at.HasField("pull") else at.blocks
        self.send(tokens, at)
        milliseconds = round((time.monotonic() - began) * 1000, 1)
        return {"engine": at.engine, "pulled_from": at.pull.engine or None, "blocks": blocks, "ms": milliseconds}

    def close(self) -> None:
        self._indexes.close()
        self._pulls.close()

    def _question(self, tokens: Sequence[int], engines: Sequence[str]) -> index_service_pb2.PlanRequest:
        request = index_service_pb2.PlanRequest(reserve=True, max_placements=ENGINES)  # we do as it says
        request.prompts.add(prompt=self.prefix(tokens), engines=engines, tokens=len(tokens))
        return request


def in_turn(at: index_service_pb2.Placement) -> index_service_pb2.Placement:
    """What is known of a request that no index has seen: who could run it."""
    return index_service_pb2.Placement(engine=at.engine, dp=at.dp)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--index", required=True)
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    router = Router(options.registry, options.index.split(","), options.model)
    router.learn()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for answer in pool.map(router.serve, (json.loads(line)["tokens"] for line in sys.stdin)):
            print(json.dumps(answer), flush=True)
    router.close()


if __name__ == "__main__":
    main()
