"""A worker's half of the connector over a scripted transfer: what vLLM is told of each request, and that once.

No engine, and but for the last test no network: the rooms below do what a test says. test_vllm.py has the real ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvgrpc.engines.vllm import worker as module
from kvgrpc.engines.vllm.handoffs import Handoffs, Pages, Receive, Send
from kvgrpc.engines.vllm.worker import Worker
from kvgrpc.errors import Failure, Reason
from kvgrpc.model import Role
from kvgrpc.server import Pool, RankConfig, open_decode, open_prefill
from kvgrpc.transfer import Align, KVPoll, KVSender, room_from_transfer_id

PAGE_BYTES = 100
WHERE = "http://10.0.0.1:8998"


class Room:
    """A sender or receiver of kvgrpc whose state the test sets."""

    def __init__(self, _transfer: object, where: str, room: int, traceparent: str = "", decode: str = "") -> None:
        self.where, self.room, self.decode = where, room, decode
        self.state, self.release_safe = KVPoll.Bootstrapping, False
        self.failure: Failure | None = None
        self.calls: list[Any] = []

    def poll(self) -> KVPoll:
        return self.state

    @property
    def ended(self) -> bool:
        return self.state in (KVPoll.Success, KVPoll.Failed)

    def init(self, pages: Any, first_page: int = 0, align: Align | None = None) -> None:
        self.calls.append(("init", pages, align or first_page))

    def send(self, pages: Mapping[str, Sequence[int]]) -> None:
        self.calls.append(("send", pages))

    def abort(self, why: str = "") -> None:
        if not self.ended:
            self.calls.append(("abort", why))
            self.fail(Reason.ROOM_CANCELLED)

    def close(self) -> None:
        self.calls.append("close")

    def succeed(self) -> None:
        self.state, self.release_safe = KVPoll.Success, True

    def fail(self, reason: Reason) -> None:
        self.state, self.failure = KVPoll.Failed, Failure(reason, "it is gone")


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> dict[int, Room]:
    """All that the worker made, by their rooms."""
    made: dict[int, Room] = {}

    def make(*arguments: Any, **more: Any) -> Room:
        room = Room(*arguments, **more)
        assert room.room not in made, "one hand-off, one handle"
        made[room.room] = room
        return room

    monkeypatch.setattr(module, "KVSender", make)
    monkeypatch.setattr(module, "KVReceiver", make)
    return made


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, rooms: dict[int, Room]) -> Worker:
    return worker_with(monkeypatch, "kv")


def worker_with(monkeypatch: pytest.MonkeyPatch, *pools: str, rank: Any = None, has_state: bool = False) -> Worker:
    place = SimpleNamespace(external="", serves_registry=False, roles=tuple(Role))
    rank = rank or SimpleNamespace(transfer=object(), ref="rank", address="127.0.0.1:1")
    for name, value in {
        "get_tensor_model_parallel_rank": 0,
        "get_pp_group": SimpleNamespace(rank_in_group=0),
        "get_pcp_group": SimpleNamespace(rank_in_group=0),
        "WorkerProcess": place,
        "pools_of": [SimpleNamespace(name=name, page_bytes=PAGE_BYTES) for name in pools],
        "groups_of": [SimpleNamespace(moves_on=has_state, has_state=has_state) for _ in pools],
        "model_of": None,
        "rank_config": None,
        "open_rank": rank,
    }.items():
        monkeypatch.setattr(module, name, lambda *_, value=value, **__: value)
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    return Worker(SimpleNamespace(parallel_config=parallel), None, {})


def room(rooms: dict[int, Room], transfer_id: str) -> Room:
    return rooms[room_from_transfer_id(transfer_id)]


def receive(*pages: int, abort: bool = False) -> Receive:
    return Receive("x", WHERE, "e", {"kv": pages}, 1, abort)


def waiting(worker: Worker, rooms: dict[int, Room], *pages: int) -> Room:
    """Decode's hand-off of request "r"."""
    worker.take_on(Handoffs(receives={"r": receive(*pages)}))
    return room(rooms, "x")


NOTHING: tuple[set[str], set[str]] = (set(), set())


def test_a_request_that_waits_for_blocks_has_a_room_without_pages_and_gets_them_later(
    worker: Worker, rooms: dict[int, Room]
) -> None:
    worker.take_on(Handoffs(queued={"r": Receive("x", WHERE, "e")}))
    assert room(rooms, "x").calls == [] and worker.finished(()) == NOTHING
    made = waiting(worker, rooms, 7, 8)
    assert made.calls == [("init", {"kv": (7, 8)}, 1)]
    made.succeed()
    assert worker.finished(()) == (set(), {"r"})


def test_one_whose_prefill_died_meanwhile_fails_once_vllm_gave_it_blocks(
    worker: Worker, rooms: dict[int, Room]
) -> None:
    worker.take_on(Handoffs(queued={"r": Receive("x", WHERE, "e")}))
    room(rooms, "x").fail(Reason.PEER_LOST)
    room(rooms, "x").release_safe = True
    assert worker.finished(()) == NOTHING and worker.take_failed_pages() == set()
    waiting(worker, rooms, 7, 8)
    assert worker.finished(()) == (set(), {"r"}) and worker.take_failed_pages() == {7, 8}


def test_one_that_is_given_up_before_it_had_blocks_is_called_off(worker: Worker, rooms: dict[int, Room]) -> None:
    worker.take_on(Handoffs(queued={"r": Receive("x", WHERE, "e")}))
    worker.take_on(Handoffs(receives={"r": receive(abort=True)}))
    assert [call for call in room(rooms, "x").calls if call[0] != "init"] == [("abort", "decode gave the request up")]


def test_a_prompt_is_announced_then_sent_and_said_to_be_sent_once(worker: Worker, rooms: dict[int, Room]) -> None:
    worker.take_on(Handoffs(announced={"r": "x"}))
    assert worker.finished(()) == NOTHING
    worker.take_on(Handoffs(computed={"r": Send("x", {"kv": (4, 9)})}))
    assert room(rooms, "x").calls == [("init", 2, Align.HEAD), ("send", {"kv": (4, 9)})]
    assert worker.finished({"r"}) == NOTHING  # vLLM is through with it long before its pages are
    room(rooms, "x").succeed()
    assert worker.finished(()) == ({"r"}, set())
    assert worker.finished(()) == NOTHING
    assert room(rooms, "x").calls[-1] == "close"


@pytest.mark.parametrize("ending", ["success", "failure"])
def test_prefill_keeps_pages_until_nobody_reads_them(worker: Worker, rooms: dict[int, Room], ending: str) -> None:
    worker.take_on(Handoffs(computed={"r": Send("x", {"kv": (4,)})}))
    sent = room(rooms, "x")
    if ending == "success":
        sent.state = KVPoll.Success
    else:
        sent.fail(Reason.PEER_LOST)
    assert worker.finished(()) == NOTHING
    sent.release_safe = True
    assert worker.finished(()) == ({"r"}, set())
    assert worker.finished(()) == NOTHING


def test_a_prompt_is_for_the_decode_that_its_request_names(worker: Worker, rooms: dict[int, Room]) -> None:
    worker.take_on(Handoffs(announced={"r": "x", "s": "y"}, bound={"r": "decode-7"}))
    assert (room(rooms, "x").decode, room(rooms, "y").decode) == ("decode-7", "")


def test_a_prompt_that_is_announced_again_keeps_its_room(worker: Worker, rooms: dict[int, Room]) -> None:
    worker.take_on(Handoffs(announced={"r": "x"}))
    worker.take_on(Handoffs(announced={"r": "x"}))
    worker.take_on(Handoffs(computed={"r": Send("x", {"kv": (4,)})}))
    assert len(rooms) == 1


def test_a_failure_before_the_prompt_is_computed_is_no_news_until_vllm_gave_the_pages(
    worker: Worker, rooms: dict[int, Room]
) -> None:
    worker.take_on(Handoffs(announced={"r": "x"}))
    room(rooms, "x").fail(Reason.ROOM_CANCELLED)
    room(rooms, "x").release_safe = True
    assert worker.finished(()) == NOTHING
    worker.take_on(Handoffs(computed={"r": Send("x", {"kv": (4,)})}))
    assert worker.finished(()) == ({"r"}, set())


def test_a_prompt_that_prefill_gives_up_is_called_off_and_never_said_to_be_sent(
    worker: Worker, rooms: dict[int, Room]
) -> None:
    worker.take_on(Handoffs(announced={"r": "x"}))
    worker.take_on(Handoffs(dropped={"r": "x"}))
    assert room(rooms, "x").calls == [("abort", "prefill gave the request up")]
    room(rooms, "x").fail(Reason.ROOM_CANCELLED)
    room(rooms, "x").release_safe = True
    assert worker.finished({"r"}) == NOTHING


def test_pages_that_came_are_said_to_be_there_once_and_counted(worker: Worker, rooms: dict[int, Room]) -> None:
    waited = waiting(worker, rooms, 7, 8)
    assert waited.where == "10.0.0.1:8998"
    assert waited.calls == [("init", {"kv": (7, 8)}, 1)]
    assert worker.finished(()) == NOTHING
    waited.succeed()
    assert worker.finished(()) == (set(), {"r"})
    assert worker.finished({"r"}) == NOTHING
    assert worker.take_failed_pages() == set()
    assert waited.calls[-1] == "close"
    stats = worker.take_stats()
    assert stats is not None and stats.data["bytes"] == 2 * PAGE_BYTES and len(stats.data["seconds"]) == 1
    assert worker.take_stats() is None


def test_a_failure_names_its_pages_at_once_and_the_request_when_they_are_quiet(
    worker: Worker, rooms: dict[int, Room]
) -> None:
    waited = waiting(worker, rooms, 7, 8)
    waited.fail(Reason.PEER_LOST)
    assert worker.finished(()) == NOTHING
    assert worker.take_failed_pages() == {7, 8}
    assert worker.finished(()) == NOTHING and worker.take_failed_pages() == set()
    waited.release_safe = True
    assert worker.finished(()) == (set(), {"r"})
    assert worker.finished(()) == NOTHING and worker.take_failed_pages() == set()
    stats = worker.take_stats()
    assert stats is not None and stats.data["failed"] == {"PEER_LOST": 1}


@pytest.mark.parametrize("pages", [{"kv": (7, 8), "swa-1": (3,)}, {"kv": (7,)}], ids=["several groups", "a state"])
def test_of_several_groups_or_a_state_a_failure_names_its_request_because_vllm_takes_no_pages_of_them(
    monkeypatch: pytest.MonkeyPatch, rooms: dict[int, Room], pages: Pages
) -> None:
    worker = worker_with(monkeypatch, *pages, has_state=len(pages) == 1)
    worker.take_on(Handoffs(receives={"r": Receive("x", WHERE, "e", pages)}))
    waited = room(rooms, "x")
    waited.fail(Reason.PEER_LOST)
    assert worker.finished(()) == NOTHING
    assert worker.take_failed_requests() == {"r"} and worker.take_failed_pages() == set()
    assert worker.take_failed_requests() == set()
    waited.release_safe = True
    assert worker.finished(()) == (set(), {"r"})


def test_bytes_of_several_groups_are_counted(monkeypatch: pytest.MonkeyPatch, rooms: dict[int, Room]) -> None:
    worker = worker_with(monkeypatch, "kv", "swa-1")
    worker.take_on(Handoffs(computed={"r": Send("x", {"kv": (4, 5), "swa-1": (9,)})}))
    room(rooms, "x").succeed()
    assert worker.finished(()) == ({"r"}, set())
    stats = worker.take_stats()
    assert stats is not None and stats.data["bytes"] == 3 * PAGE_BYTES


def test_a_hand_off_that_decode_needs_no_pages_of_ends_unsaid(worker: Worker, rooms: dict[int, Room]) -> None:
    """Prefill only has to hear that it need not wait."""
    waited = waiting(worker, rooms)
    waited.succeed()
    assert worker.finished(()) == NOTHING
    assert waited.calls[-1] == "close"


def test_a_request_that_vllm_gave_up_is_called_off_at_once(worker: Worker, rooms: dict[int, Room]) -> None:
    waited = waiting(worker, rooms, 7)
    assert worker.finished({"r"}) == NOTHING
    assert waited.calls[1:] == [("abort", "decode gave the request up")]
    assert worker.finished(()) == NOTHING
    assert worker.take_failed_pages() == set(), "nobody waits for them any more"
    waited.release_safe = True
    assert worker.finished(()) == (set(), {"r"})
    assert worker.finished(()) == NOTHING


def test_a_request_that_never_had_pages_is_called_off_without_asking_for_any(
    worker: Worker, rooms: dict[int, Room]
) -> None:
    worker.take_on(Handoffs(receives={"r": receive(abort=True)}))
    waited = room(rooms, "x")
    assert worker.finished({"r"}) == NOTHING
    assert waited.calls == [("abort", "decode gave the request up")]
    waited.release_safe = True
    assert worker.finished(()) == NOTHING
    assert waited.calls[-1] == "close"


def test_each_of_many_is_said_once_in_whatever_order_they_end(worker: Worker, rooms: dict[int, Room]) -> None:
    numbers = [str(number) for number in range(40)]
    worker.take_on(Handoffs(computed={number: Send(f"x{number}", {"kv": (int(number),)}) for number in numbers}))
    said: list[str] = []
    for number in reversed(numbers):
        room(rooms, f"x{number}").succeed()
        said += sorted(worker.finished(())[0])
    assert said == numbers[::-1]


@pytest.mark.parametrize("pages", [(), (7,)], ids=["before it had pages", "with pages"])
def test_prefill_hears_of_an_abort_at_first_contact_from_a_decode_that_makes_no_further_step(
    monkeypatch: pytest.MonkeyPatch, pages: tuple[int, ...]
) -> None:
    """An engine without requests does not call us again: what waited for prefill to be known stayed undone."""
    caches = {role: np.zeros((8, 64), np.uint8) for role in Role}
    pools = {role: (Pool.from_arrays([caches[role]], page_tokens=16),) for role in Role}
    configs = {role: RankConfig(engine=role.name, role=role, pools=pools[role]) for role in Role}
    with open_prefill(replace(configs[Role.PREFILL], registry="embedded")) as prefill:
        sender = KVSender(prefill.transfer, "", room_from_transfer_id("x"))
        sender.init(1)
        sender.send(np.array([3], np.int32))
        worker = worker_with(monkeypatch, "kv", rank=open_decode(configs[Role.DECODE]))
        asked = Receive("x", f"http://{prefill.address}", "e", {"kv": pages} if pages else {}, 0, abort=not pages)
        worker.take_on(Handoffs(receives={"r": asked}))
        worker.finished({"r"})
        sender.wait(10.0)
        assert sender.failure is not None and sender.failure.reason is Reason.ROOM_CANCELLED
        assert sender.release_safe
        worker.close()
