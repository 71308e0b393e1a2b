"""``verify`` beside a prefill that lies: whatever it says of its pages is compared, or the room does not come to be."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvgrpc.errors import Reason
from kvgrpc.transfer import KVPoll
from kvgrpc.v1 import common_pb2
from kvgrpc.wire import pool_to_pb
from tests.contract.hostile.conftest import Serve
from tests.support.hostile.honest_pair import ROOMS, TIMING
from tests.support.rank_host import AUX_BYTES, RankHost
from tests.support.transfer_peers import SUCCESS, WRITE, Memory, PrefillServer, receiver_of, said
from tests.support.waiting import wait_until

PAGES = [5, 6]
Lie = Callable[[common_pb2.PagePool], None]


@pytest.fixture(scope="module")
def verifying() -> Iterator[RankHost]:
    host = RankHost("VD", "DECODE", {"verify": True, "timing": TIMING})
    yield host
    host.close(1.0)


def there_before(host: RankHost) -> bytes:
    """Checksums of what the pages hold already."""
    sums = []
    for page in PAGES:
        found = 0
        for layer in host.memory:
            found = zlib.crc32(layer[page].tobytes(), found)
        sums.append(found)
    return np.array(sums, "<u4").tobytes()


def writes_nothing(server: PrefillServer, requests: Any, welcome: dict[str, Any], *checksums: bytes) -> Iterator[Any]:
    """Says that all was written: once with each of these checksums."""
    yield server.welcome(**welcome)
    for request in requests:
        for entry in request.rooms:
            if entry.want == WRITE:
                for told in checksums:
                    yield said(entry.room, SUCCESS, page_checksums=told, aux=bytes(AUX_BYTES))


def received(host: RankHost, server: PrefillServer) -> Any:
    receiver = receiver_of(host, server.bootstrap, next(ROOMS))
    receiver.init(PAGES, 0)
    wait_until(lambda: receiver.poll() in (KVPoll.Success, KVPoll.Failed), 30)
    return receiver


def nothing(pool: common_pb2.PagePool) -> None:
    del pool.regions[:]


def other_layers(pool: common_pb2.PagePool) -> None:
    for region in pool.regions:
        region.layer += 1_000


def fewer_layers(pool: common_pb2.PagePool) -> None:
    del pool.regions[1:]


@pytest.mark.parametrize("lie", [nothing, other_layers, fewer_layers])
def test_pools_of_which_nothing_would_be_compared_are_refused(
    verifying: RankHost, serve: Serve, memory: Memory, lie: Lie
) -> None:
    """It says that it verifies, and names layers that nobody has."""
    theirs = pool_to_pb(memory.pool.without_addresses())
    lie(theirs)
    server = serve(lambda server, requests: writes_nothing(server, requests, {"verify": True, "pools": [theirs]}, b""))
    failure = received(verifying, server).failure
    assert failure is not None and failure.reason in (Reason.PARALLEL_LAYOUT_MISMATCH, Reason.INVALID_REQUEST)


def test_no_pools_at_all_are_refused(verifying: RankHost, serve: Serve) -> None:
    server = serve(lambda server, requests: writes_nothing(server, requests, {"verify": True}, b""))
    failure = received(verifying, server).failure
    assert failure is not None and failure.reason in (Reason.PARALLEL_LAYOUT_MISMATCH, Reason.INVALID_REQUEST)


@pytest.mark.parametrize(
    ("pools", "field"),
    [
        ([common_pb2.PagePool(kind=common_pb2.POOL_KIND_KV)] * 50_000, "welcome.pools"),
        ([common_pb2.PagePool(regions=[common_pb2.PoolRegion()] * 50_000)], "welcome.pools.regions"),
    ],
    ids=["pools", "regions"],
)
def test_pools_without_end_are_refused_before_they_are_looked_at(
    verifying: RankHost, serve: Serve, pools: list[common_pb2.PagePool], field: str
) -> None:
    """Those of one message held the loop of all sessions for a minute."""
    server = serve(lambda server, requests: writes_nothing(server, requests, {"verify": True, "pools": pools}, b""))
    failure = received(verifying, server).failure
    assert failure is not None and (failure.reason, failure.metadata["field"]) == (Reason.INVALID_REQUEST, field)


def test_what_was_said_first_is_compared_and_a_second_word_changes_nothing(
    verifying: RankHost, serve: Serve, memory: Memory
) -> None:
    pools = [pool_to_pb(memory.pool.without_addresses())]
    right, wrong = there_before(verifying), bytes(8)
    server = serve(
        lambda server, requests: writes_nothing(server, requests, {"verify": True, "pools": pools}, wrong, right)
    )
    receiver = received(verifying, server)
    assert receiver.failure is not None and receiver.failure.reason is Reason.CHECKSUM_MISMATCH
    wait_until(lambda: receiver.release_safe)


def test_one_that_says_it_does_not_verify_is_named_in_the_log(
    verifying: RankHost, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing makes a prefill verify: people are told whose pages nobody compares."""
    server = serve(lambda server, requests: writes_nothing(server, requests, {}, b""))
    with caplog.at_level(logging.WARNING):
        assert received(verifying, server).failure is None
    assert f"{server.ref} does not verify" in caplog.text


def test_sums_of_what_was_there_before_are_no_proof_of_a_write(
    verifying: RankHost, serve: Serve, memory: Memory
) -> None:
    """What docs/roles.md says: checksums find accidents, and are no signature."""
    pools = [pool_to_pb(memory.pool.without_addresses())]
    sums = there_before(verifying)
    server = serve(lambda server, requests: writes_nothing(server, requests, {"verify": True, "pools": pools}, sums))
    assert received(verifying, server).failure is None
