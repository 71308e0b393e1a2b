"""The network between a publisher and its follower is cut and mended: two network namespaces, and a link."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvgrpc.client import EventFollower
from kvgrpc.events.following.messages import FollowerState
from tests.support.event_processes import SECONDS, Publisher, Report, healed, report, told
from tests.support.link import Link

__all__ = ["report"]
pytestmark = pytest.mark.timeout(400)  # processes start within it on a machine that does much else

# Their namespace is empty: every port is free.
GRPC_PORT, PUB_PORT = 5700, 5557


@pytest.fixture
def source(link: Link) -> Iterator[Publisher]:
    within = ("ip", "netns", "exec", link.name)
    started = Publisher(GRPC_PORT, PUB_PORT, host=link.host, within=within)
    yield started
    started.kill()


@pytest.mark.slow
@pytest.mark.parametrize("live", [False, True], ids=["watch", "pub"])
@pytest.mark.parametrize("long", [False, True], ids=["briefly", "beyond_silence"])
async def test_a_follower_is_exact_after_the_network_was_cut(
    link: Link, source: Publisher, long: bool, live: bool, report: Report
) -> None:
    async with EventFollower(source.address, live=live) as follower:
        await healed(follower, *await told(source, "serve 200"))
        seen = follower.freshness.next_sequence
        link.cut()
        content, next_sequence = await told(source, "serve 200")
        if long:
            while follower.state is not FollowerState.CONNECTING:
                await asyncio.wait_for(follower.changed(), SECONDS)
        # What it shows is what was true when it last heard of it.
        assert follower.freshness.next_sequence == seen < next_sequence
        link.mend()
        took = await healed(follower, content, next_sequence)
        assert follower.counts.new_logs == 0
        report(f"cut {'beyond silence' if long else 'briefly'}, live={live}: exact {took:.2f} s after it was mended")
