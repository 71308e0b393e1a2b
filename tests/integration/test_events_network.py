"""The network between a publisher and its follower is cut and mended: two network namespaces, and a link."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from kvgrpc.client import EventFollower
from kvgrpc.events.following.messages import FollowerState
from tests.integration.test_events_faults import SECONDS, Publisher, healed, told

# Their namespace is empty: every port is free.
GRPC_PORT, PUB_PORT = 5700, 5557


class Link:
    """A pair of virtual Ethernet devices: one end here, the other one in the namespace ``name``."""

    def __init__(self) -> None:
        self.name = f"kvgrpc{os.getpid()}"
        self._here, there = f"kvg{os.getpid()}a", f"kvg{os.getpid()}b"
        # Whose tests run beside these has another process id, and so other addresses of 10.128.0.0/10.
        subnet = (10 << 24) + (128 << 16) + 4 * (os.getpid() % (1 << 20))
        own, self.host = (".".join(map(str, (subnet + last).to_bytes(4, "big"))) for last in (1, 2))
        ip("netns", "add", self.name)
        try:
            ip("link", "add", self._here, "type", "veth", "peer", "name", there, "netns", self.name)
            ip("addr", "add", f"{own}/30", "dev", self._here)
            ip("-n", self.name, "addr", "add", f"{self.host}/30", "dev", there)
            ip("-n", self.name, "link", "set", there, "up")
            self.mend()
        except BaseException:
            self.remove()
            raise

    def cut(self) -> None:
        ip("link", "set", self._here, "down")

    def mend(self) -> None:
        ip("link", "set", self._here, "up")

    def remove(self) -> None:
        # A namespace takes its devices with it some time later, and the next link has the same names.
        with contextlib.suppress(OSError):
            ip("link", "del", self._here)
        ip("netns", "del", self.name)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def link() -> Iterator[Link]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    try:
        made = Link()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.remove()


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
    link: Link, source: Publisher, long: bool, live: bool
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
        print(f"\ncut {'beyond silence' if long else 'briefly'}, live={live}: exact {took:.2f} s after it was mended")
