"""What a follower shows of an engine that runs without kvgrpc, over a relay of its own publisher."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvgrpc.client import SyncEventFollower
from kvgrpc.server import EventRelay

LOCAL = "127.0.0.1"


def shown_by_a_relay(engine: str, pub: int, router: int, wanted: Mapping[str, int]) -> Mapping[str, int]:
    """Blocks by medium, once they are ``wanted``, or after 20 s. ``pub``, ``router``: ports of its publisher."""
    endpoint, replay = f"tcp://{LOCAL}:{pub}", f"tcp://{LOCAL}:{router}"
    relay = EventRelay(f"{LOCAL}:0", endpoint, engine, replay=replay, topic="kv").open()
    try:
        with SyncEventFollower(relay.address) as follower:
            end = time.monotonic() + 20
            while follower.blocks != wanted and time.monotonic() < end:
                time.sleep(0.05)
            return follower.blocks
    finally:
        relay.close()
