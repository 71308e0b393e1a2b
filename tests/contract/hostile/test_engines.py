"""Engines that hand over nonsense: it fails their room, not the session that all rooms share."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import pytest

from kvgrpc.errors import Reason
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import receiver_of, sender_of
from tests.support.waiting import wait_until

ROOMS = itertools.count(4_000_000)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")

    __repr__ = __str__


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
        wait_until(lambda: all(sender.poll() is KVPoll.WaitingForInput for sender in senders))
        receivers[0].abort("\ud800")
        senders[1].abort("\udfff")
        wait_until(lambda: senders[0].failure is not None and receivers[1].failure is not None)
        assert senders[0].failure.reason is receivers[1].failure.reason is Reason.ROOM_CANCELLED
        senders[2].init(1, 0)
        senders[2].send([1])
        wait_until(lambda: receivers[2].poll() is KVPoll.Success)

    @pytest.mark.parametrize("first_page", [-1, 2**32, "x", 1.5, None, np.array([1, 2]), b"1", Unprintable()])
    def test_a_first_page_that_is_none_fails_that_room(
        self, prefill: RankHost, decode: RankHost, first_page: Any
    ) -> None:
        receiver = receiver_of(decode, f"{prefill.rank.address}/P", next(ROOMS))
        receiver.init([1], 0, first_page)
        wait_until(lambda: receiver.poll() is KVPoll.Failed)
        assert receiver.failure.reason is Reason.INVALID_REQUEST

    @pytest.mark.parametrize("row", [-1, 2**40, "0", 1.5, np.array([1, 2]), Unprintable()])
    def test_an_aux_row_that_is_none_fails_that_room(self, prefill: RankHost, decode: RankHost, row: Any) -> None:
        receiver = receiver_of(decode, f"{prefill.rank.address}/P", next(ROOMS))
        receiver.init([1], row)
        wait_until(lambda: receiver.poll() is KVPoll.Failed)
        assert receiver.failure.reason is Reason.INVALID_REQUEST
        assert receiver.failure.metadata["field"] == ("arguments" if isinstance(row, Unprintable) else "aux_index")

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
        wait_until(lambda: sender.failure is not None and receiver.failure is not None)
        for failure in (sender.failure, receiver.failure):
            assert failure.reason is Reason.INVALID_REQUEST
            assert failure.metadata["field"] == field
            assert {"value", "rule"} <= failure.metadata.keys()

    @pytest.mark.parametrize("why", [b"enough", 7, Unprintable(), np.array([1, 2]), None])
    def test_an_abort_says_why_whatever_it_is_given(self, prefill: RankHost, decode: RankHost, why: Any) -> None:
        room = next(ROOMS)
        receiver, sender = receiver_of(decode, f"{prefill.rank.address}/P", room), sender_of(prefill, room)
        receiver.init([33], 6)
        wait_until(lambda: sender.poll() is KVPoll.WaitingForInput)
        receiver.abort(why)
        wait_until(lambda: sender.poll() is KVPoll.Failed)
        assert receiver.failure.reason is sender.failure.reason is Reason.ROOM_CANCELLED
        assert isinstance(receiver.failure.message, str) and receiver.failure.message == sender.failure.message

    def test_a_wait_that_raises_what_cannot_be_printed_fails_its_room_alone(
        self, prefill: RankHost, decode: RankHost
    ) -> None:
        def wait() -> None:
            raise Unprintable

        room = next(ROOMS)
        receiver, sender = receiver_of(decode, f"{prefill.rank.address}/P", room), sender_of(prefill, room)
        receiver.init([34], 7)
        sender.init(1, 0)
        sender.send([1], wait=wait)
        wait_until(lambda: receiver.poll() is KVPoll.Failed)
        assert receiver.failure.reason is Reason.TRANSFER_FAILED
        metadata = receiver.failure.metadata
        assert metadata.keys() == {"dataPlane", "outcome", "code"} and "Unprintable" in metadata["code"]
        assert metadata["dataPlane"] == "shm"

    @pytest.mark.parametrize("pages", [[5, 5], [7, 1, 7], np.array([3, 2, 1, 3], np.int32)])
    def test_a_page_given_twice_fails_its_room_before_a_page_of_the_prompt_is_lost(
        self, prefill: RankHost, decode: RankHost, pages: Any
    ) -> None:
        receiver = receiver_of(decode, f"{prefill.rank.address}/P", next(ROOMS))
        receiver.init(pages, 0)
        wait_until(lambda: receiver.poll() is KVPoll.Failed)
        assert receiver.failure.reason is Reason.INVALID_REQUEST and receiver.failure.metadata["field"] == "pages"

    def test_numbers_of_numpy_are_numbers(self, prefill: RankHost, decode: RankHost) -> None:
        room, one, zero = np.int64(next(ROOMS)), np.int32(1), np.uint8(0)
        address = f"{prefill.rank.address}/P"
        receiver = KVReceiver(
            cast(Any, decode.rank.transfer), address, cast(Any, room), cast(Any, one), cast(Any, zero)
        )
        receiver.init([35], cast(Any, zero), cast(Any, zero))
        sender = KVSender(cast(Any, prefill.rank.transfer), address, cast(Any, room), cast(Any, one))
        sender.init(cast(Any, one), cast(Any, zero))
        sender.send([2], is_last=cast(Any, np.bool_(True)))
        wait_until(lambda: receiver.poll() is KVPoll.Success)

    @pytest.mark.parametrize("dp_rank", [-1, 7, "x", np.array([1, 2])])
    def test_a_dp_rank_that_is_none_fails_that_room(self, prefill: RankHost, decode: RankHost, dp_rank: Any) -> None:
        receiver = KVReceiver(cast(Any, decode.rank.transfer), f"{prefill.rank.address}/P", next(ROOMS), 0, dp_rank)
        wait_until(lambda: receiver.failure is not None)

    @pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:0", "127.0.0.1:99999", "\ud800:1", None, []])
    def test_an_address_that_is_none_fails_that_room(self, decode: RankHost, address: Any) -> None:
        receiver = receiver_of(decode, address, next(ROOMS))
        wait_until(lambda: receiver.failure is not None)
