"""Certificates that are renewed make clients dial anew, and end nothing that is under way."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import Client, EventFollower
from kvgrpc.errors import InvalidRequest
from kvgrpc.events.following.messages import FollowerState
from kvgrpc.registry import watching
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.server import RegistryServer
from tests.support.certificates import OPENSSL, Authority
from tests.support.publishing import Publishing
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="makes its certificates with openssl")


@pytest.fixture
def server(tmp_path: Path) -> ServerSecurity:
    certificate = Authority(tmp_path).sign("server", "IP:127.0.0.1")
    return ServerSecurity(certificate.cert_file, certificate.key_file)


@pytest.fixture
def client(tmp_path: Path) -> ClientSecurity:
    return ClientSecurity(ca_file=str(tmp_path / "authority.pem"))


def knows_all(follower: EventFollower, engine: Publishing) -> bool:
    return follower.state is FollowerState.CURRENT and follower.blocks == {"GPU": len(engine.holds["GPU"])}


async def test_a_live_follower_hears_its_heartbeats_still(server: ServerSecurity, client: ClientSecurity) -> None:
    """The Watch that fills a hole dials anew; that of heartbeats goes on, and so does the follower."""
    live: dict[str, Any] = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0"}
    async with (
        Publishing(security=server, **live) as engine,
        EventFollower(engine.address, live=True, security=client) as follower,
    ):
        await engine.store([1])
        await until(lambda: knows_all(follower, engine))
        follower.core.live = lambda sequence, payload, now: None  # type: ignore[method-assign]
        os.utime(client.ca_file)
        for block in range(2, 6):
            await engine.store([block])
            await until(lambda: knows_all(follower, engine))
        assert (follower.counts.replays, follower.counts.failures) == (4, 0)


async def test_a_watch_that_is_cancelled_by_others_begins_again() -> None:
    async with Publishing() as engine, EventFollower(engine.address) as follower:
        await engine.store([1])
        await until(lambda: knows_all(follower, engine))
        assert follower._channel is not None
        await follower._channel.close()
        await engine.store([2])
        await until(lambda: knows_all(follower, engine))
        assert follower.counts.failures == 1


async def test_a_stream_of_a_client_goes_on(
    server: ServerSecurity, client: ClientSecurity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "HEARTBEAT_SECONDS", 1.0)
    registry = RegistryServer(["127.0.0.1:0"], security=server)
    registry.open()
    with closing(registry):
        async with Client(registry.address, client) as asking:
            told = asking.watch_engines()
            await anext(told)
            listening = asyncio.ensure_future(anext(told))
            os.utime(client.ca_file)
            with pytest.raises(InvalidRequest):  # whatever fails makes it look at the files
                await asking.get_engine("")
            assert (await asking.get_server_info()).version
            await listening
            await told.aclose()  # type: ignore[attr-defined]
