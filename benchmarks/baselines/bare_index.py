"""The floor of an index in Python: a bare grpc.aio server that parses a Score and sends an answer that stood ready.

``python -m benchmarks.baselines.bare_index ENGINES BLOCKS MOST [SOURCE]``: a fleet of ``clients/rust/index/examples``,
and how many of its caches each prompt is told. With SOURCE it reads the streams of that fleet too, parses each message
and does nothing with it. Says its address once it is ready.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import grpc

from kvgrpc.events.log.digest import mix
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.v1 import event_service_pb2, index_service_pb2
from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub

# As examples/support/layout.rs has them.
CHAIN = 512
HELD = ((4, CHAIN), (16, 256), (sys.maxsize, 64))


def main(arguments: Sequence[str]) -> None:
    engines, blocks, most = map(int, arguments[:3])
    asyncio.run(_serve(_answers(engines, blocks, most), engines, arguments[3] if len(arguments) > 3 else ""))


async def _serve(answers: dict[int, bytes], engines: int, source: str) -> None:
    readers = []
    if source:
        begun = [asyncio.Event() for _ in range(engines)]
        readers = [asyncio.create_task(_read(source, f"engine{at}", each)) for at, each in enumerate(begun)]
        await asyncio.gather(*(each.wait() for each in begun))

    # A message is its fields behind each other: that of a prompt is made once, with its tag and length.
    async def score(request: index_service_pb2.ScoreRequest, context: Any) -> bytes:
        return b"".join([answers[prompt.block_hashes.values[0]] for prompt in request.prompts])

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler: Any = grpc.unary_unary_rpc_method_handler(score, index_service_pb2.ScoreRequest.FromString)
    service = grpc.method_handlers_generic_handler("kvgrpc.v1.IndexService", {"Score": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.gather(server.wait_for_termination(), *readers)


async def _read(source: str, engine: str, begun: asyncio.Event) -> None:
    """``begun``: its snapshot is over."""
    request = event_service_pb2.WatchRequest(engine=engine, mode=event_service_pb2.WATCH_MODE_SNAPSHOT)
    async with open_channel(source, own_connection=True) as channel:
        call: Any = EventServiceStub(channel).Watch(request)
        while (message := await call.read()) is not grpc.aio.EOF:
            if message.WhichOneof("kind") == "heartbeat":
                begun.set()


def _answers(engines: int, blocks: int, most: int) -> dict[int, bytes]:
    """Of each conversation of such a fleet, by the hash of its first block: the caches that hold most of it."""
    held = sum(_held(place) for place in range(engines))
    return {mix(chain * CHAIN): _answer(chain, engines, most) for chain in range(max(1, blocks * engines // held))}


def _answer(chain: int, engines: int, most: int) -> bytes:
    found = [((place + 7 * chain) % engines, place) for place in range(engines)]
    best = sorted((-_held(at), f"engine{place}") for at, place in found)[: most or None]
    told = index_service_pb2.PromptScores(
        blocks=CHAIN,
        scores=[
            index_service_pb2.CacheScore(
                engine=engine,
                device_blocks=-held,
                host_blocks=-held,
                disk_blocks=-held,
                blocks=-held,
                page_tokens=16,
            )
            for held, engine in best
        ],
    )
    return index_service_pb2.ScoreResponse(prompts=[told]).SerializeToString()


def _held(place: int) -> int:
    return next(held for below, held in HELD if place < below)


if __name__ == "__main__":
    main(sys.argv[1:])
