"""Engines that hand over nonsense: it fails their room, not the session that all rooms share."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from kvgrpc.errors import Reason
from kvgrpc.transfer import KVPoll, KVReceiver
from tests.contract.transfer_peers import (
    eventually,
    receiver_of,
    sender_of,
)
from tests.integration.rank_host import RankHost

ROOMS = itertools.count(4_000_000)


class TestEnginesThatErr:
    """What an engine hands over wrongly fails its room, not the session that all rooms share."""

    def test_text_that_is_no_utf8_harms_nobody(self, prefill: RankHost, decode: RankHost) -> None:
        rooms = [next(ROOMS) for _ in range(3)]
        bootstrap = f"{prefill.rank.address}/P"
        receivers = [receiver_of(decode, bootstrap, room) for room in rooms[:2]]
        receivers.append(KVReceiver(cast(Any, decode.rank.transfer), bootstrap, rooms[2], traceparent="\ud800"))
        for receiver in receivers:
            receiver.init([20], 4)
        senders = [sender_of(prefill, room) for room in rooms]
        eventually(lambda: all(sender.poll() is KVPoll.WaitingForInput for sender in senders))
        receivers[0].abort("\ud800")
        senders[1].abort("\udfff")
        eventually(lambda: senders[0].failure is not None and receivers[1].failure is not None)
        assert senders[0].failure.reason is receivers[1].failure.reason is Reason.ROOM_CANCELLED
        senders[2].init(1, 0)
        senders[2].send([1])
        eventually(lambda: receivers[2].poll() is KVPoll.Success)

    @pytest.mark.parametrize("first_page", [-1, 2**32, "x", 1.5])
    def test_a_first_page_that_is_none_fails_that_room(
        self, prefill: RankHost, decode: RankHost, first_page: Any
    ) -> None:
        receiver = receiver_of(decode, f"{prefill.rank.address}/P", next(ROOMS))
        receiver.init([1], 0, first_page)
        eventually(lambda: receiver.poll() is KVPoll.Failed)
        assert receiver.failure.reason is Reason.INVALID_REQUEST

    @pytest.mark.parametrize("attempt", [-1, 2**32, 1.5, None, "1"])
    def test_an_attempt_that_is_none_fails_that_room(self, prefill: RankHost, decode: RankHost, attempt: Any) -> None:
        receiver = KVReceiver(cast(Any, decode.rank.transfer), f"{prefill.rank.address}/P", next(ROOMS), attempt)
        assert receiver.failure is not None
        assert receiver.failure.reason is Reason.INVALID_REQUEST

    @pytest.mark.parametrize(
        ("field", "init", "send"),
        [
            ("num_pages", ("2",), None),
            ("num_pages", (2.5,), None),
            ("num_pages", (-1,), None),
            ("align", (1, 0, "head"), None),
            ("index_slice", (2, 0), ([1, 2], (0, 2))),
            ("index_slice", (2, 0), ([1, 2], slice("a", "b"))),
            ("index_slice", (2, 0), ([1, 2], slice(0, 4, 2))),
            ("index_slice", (2, 0), ([1, 2], slice(-2, 0))),
            ("aux_index", (1, "0"), ([1],)),
        ],
    )
    def test_what_no_sender_can_take_fails_that_room_and_names_the_field(
        self, prefill: RankHost, decode: RankHost, field: str, init: Any, send: Any
    ) -> None:
        """The engine's thread never sees an exception, whatever it asks."""
        room = next(ROOMS)
        receiver, sender = receiver_of(decode, f"{prefill.rank.address}/P", room), sender_of(prefill, room)
        receiver.init([30, 31], 5)
        sender.init(*init)
        if send is not None:
            sender.send(*send)
        eventually(lambda: sender.failure is not None and receiver.failure is not None)
        for failure in (sender.failure, receiver.failure):
            assert failure.reason is Reason.INVALID_REQUEST
            assert failure.metadata["field"] == field
            assert {"value", "rule"} <= failure.metadata.keys()

    @pytest.mark.parametrize("dp_rank", [-1, 7, "x"])
    def test_a_dp_rank_that_is_none_fails_that_room(self, prefill: RankHost, decode: RankHost, dp_rank: Any) -> None:
        receiver = KVReceiver(cast(Any, decode.rank.transfer), f"{prefill.rank.address}/P", next(ROOMS), 0, dp_rank)
        eventually(lambda: receiver.failure is not None)

    @pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:0", "127.0.0.1:99999", "\ud800:1", None, []])
    def test_an_address_that_is_none_fails_that_room(self, decode: RankHost, address: Any) -> None:
        receiver = receiver_of(decode, address, next(ROOMS))
        eventually(lambda: receiver.failure is not None)
