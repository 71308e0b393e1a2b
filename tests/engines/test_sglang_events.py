"""KV events of a real SGLang engine, by SGLang's publisher and by ours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvgrpc.client import EventFollower
from kvgrpc.events.codec import decode_batch
from kvgrpc.events.log.digest import DigestCounter, hash_key, medium_key
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored
from tests.engines.engine import LOCAL, PAGE, Engine, engine_arguments, free_port
from tests.engines.model import Case, Reference

pytestmark = pytest.mark.timeout(900)
# An engine on a busy CPU compiles before it answers.
FIRST_REQUEST_SECONDS = 200.0


class Published:
    """An engine whose events somebody reads."""

    def __init__(self, folder: Path, model: Path, publisher: str, **events: Any) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        # The engine connects to us: so nothing is lost before a subscription is there.
        port = self._socket.bind_to_random_port(f"tcp://{LOCAL}")
        config = {"publisher": publisher, "endpoint": f"tcp://{LOCAL}:{port}", "topic": "kv"}
        arguments = {
            **engine_arguments(model, 1),
            "port": free_port(),
            "kv_events_config": json.dumps(config),
        }
        environment = {"KVGRPC_EVENTS": json.dumps(events), "KVGRPC_EVENTS_LISTEN": f"{LOCAL}:0"}
        self.engine = Engine("events", folder, arguments, environment)

    def serve(self, cases: list[Case]) -> list[bytes]:
        """The payloads that were published while these were computed, one after another."""
        for case in cases:
            assert self.engine.generate(case.prompt, len(case.tokens)).result(FIRST_REQUEST_SECONDS) == case.tokens
        payloads: list[bytes] = []
        while self._socket.poll(3000):
            topic, number, payload = self._socket.recv_multipart()
            assert (topic, int.from_bytes(number, "big")) == (b"kv", len(payloads))
            payloads.append(payload)
        return payloads

    def close(self) -> None:
        self.engine.close()
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def cases(reference: Reference) -> list[Case]:
    first = reference.case(8 * PAGE + 3)
    return [first, reference.case(10 * PAGE, prefix=first.prompt[: 4 * PAGE]), *map(reference.case, (300, 280))]


def timeless(payload: bytes) -> bytes:
    """Times are float64, so that this changes no length."""
    return msgspec.msgpack.encode([0.0, *msgspec.msgpack.decode(payload)[1:]])


async def test_events_are_those_of_sglangs_own_publisher_byte_by_byte_and_are_followed(
    folder: Path, reference: Reference, cases: list[Case]
) -> None:
    published = []
    for publisher in ("zmq", "kvgrpc"):
        opened = Published(folder, reference.path, publisher, clear_first=False)
        try:
            opened.engine.wait_ready()
            published.append(opened.serve(cases))
            if publisher == "kvgrpc":
                (address,) = re.findall(r"kvgrpc: events of .* served at (\S+)", opened.engine.log())
                async with EventFollower(address) as follower:
                    await follower.until_current(20)
                    assert follower.counts.digests_different == 0
                    shown = follower.blocks
        finally:
            opened.close()
    theirs, ours = published
    assert any(b"BlockStored" in payload for payload in theirs)
    assert [timeless(payload) for payload in ours] == [timeless(payload) for payload in theirs]
    assert shown == {tier.medium: tier.blocks for tier in folded(ours)}


def folded(payloads: list[bytes]) -> Any:
    """What the payloads come to, told as plainly as possible."""
    there: dict[tuple[str, int], int] = {}
    for payload in payloads:
        for event in decode_batch(payload).events:
            if isinstance(event, AllBlocksCleared):
                there.clear()
            elif isinstance(event, BlockStored | BlockRemoved):
                for block in event.block_hashes:
                    place = (medium_key(event.medium), hash_key(block))
                    there[place] = there.get(place, 0) + (1 if isinstance(event, BlockStored) else -1)
    counter = DigestCounter()
    for (medium, key), copies in there.items():
        if copies > 0:
            counter.add(medium, 0, [key])
    return counter.digest(0).tiers
