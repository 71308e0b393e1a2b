"""What GetServerInfo says of a data plane's own bounds."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvgrpc.dataplane.mooncake.plane import IN_FLIGHT, MooncakeDataPlane
from kvgrpc.dataplane.shm.plane import ShmDataPlane
from kvgrpc.server.port.description import rank_limits
from kvgrpc.transfer.protocol.types import Bounds

FRAME_BYTES = 65_536


@pytest.mark.parametrize("transport", ["tcp", "rdma"])
def test_those_of_mooncake_are_those_of_its_transport(transport: str) -> None:
    plane: Any = MooncakeDataPlane.__new__(MooncakeDataPlane)  # no engine is needed to say it
    plane.transport = transport
    told, kept = rank_limits(FRAME_BYTES, Bounds(), cast(MooncakeDataPlane, plane)), IN_FLIGHT[transport]
    assert (told.max_peer_writes_in_flight, told.max_peer_bytes_in_flight) == (kept.most_writes, kept.nbytes)


def test_shm_has_none() -> None:
    plane = ShmDataPlane()
    told = rank_limits(FRAME_BYTES, Bounds(), plane)
    assert (told.max_peer_writes_in_flight, told.max_peer_bytes_in_flight) == (0, 0)
    assert plane.close(1.0)
