"""What router and processes say survives the pipe."""

from __future__ import annotations

import pytest

from kvgrpc.demo import protocol as p


@pytest.mark.parametrize(
    "message",
    [
        p.Open("shm", "127.0.0.1:1"),
        p.Compute(2**63 - 1, "127.0.0.1:1/prefill", [256, 65], 32),
        p.ClearCache(),
        p.Close(),
    ],
)
def test_to_a_process(message: p.ToProcess) -> None:
    line = p.encode(message)
    assert b"\n" not in line
    assert p.to_process.decode(line) == message


@pytest.mark.parametrize(
    "message",
    [
        p.Loaded(),
        p.Received(2**63 - 1, 3, 1, 0.1, "d"),
        p.RoomFailed(1, "PEER_LOST", "two\nlines"),
        p.Reported([-1], 2, 0.5),
    ],
)
def test_to_the_router(message: p.ToRouter) -> None:
    line = p.encode(message)
    assert b"\n" not in line
    assert p.to_router.decode(line) == message
