"""What a scrape of a rank shows: every part of a hand-off, and never a word that a peer chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from kvgrpc.errors import Reason
from kvgrpc.observability.hand_offs import ROLES, STAGES
from kvgrpc.observability.metrics import REGISTRY
from kvgrpc.observability.ranks import DEPTHS
from kvgrpc.registry.client.registration import STATES
from kvgrpc.rpc.interceptors import ALLOWED
from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.protocol.types import RoomState, SessionState
from kvgrpc.v1 import transfer_service_pb2 as pb
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import DecodeClient, receiver_of, sender_of
from tests.support.waiting import wait_until

ROOMS = iter(range(700_000_000, 800_000_000))
Dial = Callable[..., DecodeClient]
Series = tuple[str, frozenset[tuple[str, str]]]
# Label -> what may stand there, where that is a matter of our own code alone.
WORDS: dict[str, set[str]] = {
    "role": set(ROLES),
    "stage": set(STAGES),
    "outcome": {"success", "failed", "DONE", "REJECTED", "FAILED_SRC_FREE", "FAILED_UNKNOWN"},
    "reason": {"", *(reason.name for reason in Reason)},
    "code": {code.name for code in grpc.StatusCode},
    "state": {*(state.name.lower() for kind in (RoomState, SessionState) for state in kind), "none", *STATES},
    "direction": {"sent", "received"},
}


def page() -> dict[Series, float]:
    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def value(name: str, **labels: str) -> float:
    return page().get((name, frozenset(labels.items())), 0.0)


def hand_off(prefill: RankHost, decode: RankHost) -> None:
    room = next(ROOMS)
    receiver = receiver_of(decode, f"{prefill.rank.address}/P", room)
    receiver.init([1, 2], 0)
    sender = sender_of(prefill, room)
    sender.init(2, 0)
    sender.send([3, 4])
    wait_until(lambda: receiver.poll() is KVPoll.Success and sender.poll() is KVPoll.Success)


def stranger(prefill: RankHost, dial: Dial, name: str) -> None:
    """A decode of another name: rooms of its own, words of its own, calls of methods that are none."""
    room = next(ROOMS)
    client = dial(prefill, engine=name).open()
    client.write(room, [1], traceparent=name)
    client.want(
        room, pb.WANT_STOP, failure={"reason": 10_000 + room % 1_000, "message": name, "metadata": {name: name}}
    )
    client.ended(room)
    with grpc.insecure_channel(prefill.rank.address) as channel, pytest.raises(grpc.RpcError):
        method: Any = channel.unary_unary(f"/kvgrpc.v1.{name}/{name}")
        method(b"", timeout=10)


@pytest.fixture
def busy(prefill: RankHost, decode: RankHost, dial: Dial) -> Iterator[None]:
    hand_off(prefill, decode)
    for number in range(3):
        stranger(prefill, dial, f"stranger-{number}")
    yield


@pytest.mark.usefixtures("busy")
def test_no_word_of_a_peer_becomes_a_label_and_more_peers_make_no_more_series(
    prefill: RankHost, decode: RankHost, dial: Dial
) -> None:
    before = page()
    for number in range(3, 12):
        stranger(prefill, dial, f"stranger-{number}")
        hand_off(prefill, decode)
    after = page()
    assert set(after) - set(before) == set()
    # What these peers moved; other tests of this process left series of other capabilities.
    for name, labels in [series for series, value in after.items() if value != before[series]]:
        for label, word in labels:
            assert word in WORDS.get(label, {word}), (name, label, word)
            assert "stranger" not in word
            if label == "method":
                assert word in ALLOWED or word.startswith(("/grpc.", "other", "unknown")), word


@pytest.mark.usefixtures("busy")
def test_every_part_of_a_hand_off_is_there() -> None:
    for role in ROLES:
        for stage in STAGES:
            assert value("kvgrpc_hand_off_stage_seconds_count", role=role, stage=stage) > 0, (role, stage)
    assert value("kvgrpc_data_plane_descriptors_total", data_plane="shm") > 0
    names = {name for name, _ in page()}
    assert {f"kvgrpc_{name}" for name in DEPTHS} <= names
    assert {"kvgrpc_registry_watch_readers", "kvgrpc_rooms"} <= names


def test_rooms_are_counted_by_their_state(prefill: RankHost, decode: RankHost) -> None:
    before = value("kvgrpc_rooms", role="prefill", state="bootstrapping")
    senders: list[Any] = [sender_of(prefill, next(ROOMS)) for _ in range(5)]
    wait_until(lambda: value("kvgrpc_rooms", role="prefill", state="bootstrapping") == before + 5)
    for sender in senders:
        sender.abort()
    wait_until(lambda: value("kvgrpc_rooms", role="prefill", state="bootstrapping") == before)
