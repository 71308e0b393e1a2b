"""Chunks of one vLLM's host memory taken by another's tiers: vLLM's own managers, two in one process, no engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, get_offload_block_hash, make_offload_key

from kvgrpc.client import SyncClient
from kvgrpc.engines.vllm import orders, tier
from kvgrpc.engines.vllm.offload import questions
from kvgrpc.engines.vllm.offload.lending import LentChunks
from kvgrpc.engines.vllm.offload.promotion import LOOKUPS_OF_A_STEP, NEAR, Promotion
from kvgrpc.errors import InvalidRequest, PeerUnreachable, StorageFailed
from kvgrpc.prefetch.model import OperationKind, PrefetchLimits
from kvgrpc.prefetch.orders import EngineOrders
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.pull.staging import Staging
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import prefetch_service_pb2 as pb
from kvgrpc.v1 import pull_service_pb2
from tests.engines.vllm_tiers import BLOCK, Offloading, ended, keys_of, offloading, prompt, start
from tests.support.faults.storage import DOWN, FaultyBackend, memory_backend
from tests.support.waiting import SECONDS, wait_until

POLLS = "vllm_offload_tier_poll"
PULL = {"staging_pages": 64, "answer_timeout": 5.0, "stall_timeout": 5.0}


@contextmanager
def pair(
    path: Path | None = None, lends: Path | None = None
) -> Iterator[tuple[Offloading, SyncClient, Offloading, SyncClient]]:
    """The one that lends, with the storage at ``lends``, and the one that takes, with that at ``path``; None: none."""
    registry = RegistryServer(["127.0.0.1:0"]).open()
    common: dict[str, Any] = {"registry": registry.address, "data_plane": "shm", "pull": PULL}
    try:
        with (
            offloading(lends, **{**common, "engine": "lends"}) as (holder, holders),
            offloading(path, **{**common, "engine": "takes"}) as (taker, takers),
        ):
            with SyncClient(registry.address) as known:
                holder.wait(lambda: {each.name for each in known.list_engines()} == {"lends", "takes"})
            yield holder, holders, taker, takers
    finally:
        registry.close()


def pulled(client: SyncClient) -> list[pull_service_pb2.Pull]:
    return list(client.list_pulls().pulls)


def comes(taker: Offloading, takers: SyncClient, tokens: list[int]) -> pb.CacheOperation:
    """An order, again until the taker has heard of the holder."""
    last = pb.CacheOperation()

    def some() -> bool:
        last.CopyFrom(ended(takers, start(takers, tokens)))
        return last.state != pb.OPERATION_STATE_DECLINED

    taker.wait(some, 20.0)
    return last


def test_what_one_engine_computed_comes_to_another_with_its_bytes(tmp_path: Path) -> None:
    keys = keys_of(prompt(6))
    with pair() as (holder, holders, taker, takers):
        holder.compute(keys)
        operation = comes(taker, takers, prompt(6))
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, 6)
        assert taker.request(keys) == 6
        assert sum(each.done_pages for each in pulled(takers)) == 6
        holder.wait(lambda: sum(each.done_pages for each in pulled(holders)) == 6)
        holder.wait(holder.nothing_is_held)
        taker.wait(taker.nothing_is_held)


def test_requests_that_begin_at_different_chunks_get_the_right_bytes(tmp_path: Path) -> None:
    """The same prompt, of which one request has the head on its device: what a holder counted for the one is not
    what the other asks for."""
    keys = keys_of(prompt(6))
    with pair() as (holder, _, taker, takers):
        holder.compute(keys)
        comes(taker, takers, prompt(6))
        for first in (0, 3, 1, 5):
            taker.empty_host()
            assert taker.look_up(keys, first) == 6 - first
            assert taker.request(keys[first:]) == 6 - first


def test_a_request_may_name_whom_to_pull_from(tmp_path: Path) -> None:
    keys = keys_of(prompt(6))
    with pair() as (holder, _, taker, takers):
        holder.compute(keys)
        comes(taker, takers, prompt(6))
        host, _, port = holder.address.rpartition(":")
        llm_d = {"kv_request_id": "r", "remote_host": host, "remote_port": int(port)}
        asked: tuple[tuple[dict[str, Any], int], ...] = (
            ({"pull_from": ["lends"]}, 6),
            ({"pull_from": [holder.address]}, 6),
            ({"remote_kv_source": llm_d}, 6),
            ({"pull_from": ["nobody"]}, 0),
            ({"pull_from": []}, 0),
            ({"pull_from": 7, "remote_kv_source": 7}, 6),
        )
        for parameters, chunks in asked:
            taker.empty_host()
            assert (parameters, taker.look_up(keys, **parameters)) == (parameters, chunks)


def test_a_router_may_say_it_in_vllms_own_envelope(tmp_path: Path) -> None:
    keys = keys_of(prompt(6))
    with pair() as (holder, _, taker, takers):
        holder.compute(keys)
        comes(taker, takers, prompt(6))
        for address, chunks in ((f"tcp://{holder.address}", 6), ("tcp://127.0.0.1:1", 0)):
            payload = {"source_control_endpoint": address, "block_hashes": [1, 2]}
            fetch = KvHintAction("a", "kv.fetch", "1.0", payload)
            taker.empty_host()
            assert taker.look_up(keys, kv_hints=KvHintsEnvelope("1.0", "m", [fetch])) == chunks


def test_what_the_holder_lacks_comes_from_storage(tmp_path: Path) -> None:
    keys = keys_of(prompt(8))
    with pair(tmp_path) as (holder, _, taker, takers):
        taker.compute(keys)
        taker.empty_host()
        holder.compute(keys[:3])
        holder.wait(lambda: taker_sees(taker, takers))
        operation = ended(takers, start(takers, prompt(8)))
        assert (operation.state, operation.completed_pages) == (pb.OPERATION_STATE_DONE, 8)
        assert taker.request(keys) == 8


def taker_sees(taker: Offloading, takers: SyncClient) -> bool:
    """Whether the taker has heard of the holder."""
    return bool(taker.tier._server._peer._holders.candidates())


def test_a_store_that_is_down_hides_nothing_of_what_other_engines_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other engine has the head of the prompt, and for the rest the store is asked."""
    keys, store = keys_of(prompt(6)), FaultyBackend(memory_backend())
    monkeypatch.setattr(tier, "open_backend", lambda *_: store)
    with pair(tmp_path) as (holder, _, taker, takers):
        holder.compute(keys[:4])
        comes(taker, takers, prompt(4))
        taker.empty_host()
        store.fault, asked = lambda call, key: DOWN, len(store.calls)
        assert taker.look_up(keys) == 4 and taker.request(keys) == 4
        assert "count" in {call for call, _ in store.calls[asked:]}


def test_a_stranger_hears_nothing_of_storage_and_nothing_is_promoted_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the question, nor where chunks that it was told of went to storage before it asked for them: the
    tier of storage is not asked, whose hit would be promoted."""
    keys = keys_of(prompt(6))
    with pair(lends=tmp_path) as (holder, _, taker, takers):
        holder.compute(keys)
        holder.wait(lambda: taker_sees(taker, takers))
        assert takers.lookup(pb.PromptPages(tokens=prompt(6))).storage_pages == 6
        holder.empty_host()
        storage, asked = holder.manager.secondary_tiers[0], list[str]()
        look = storage.lookup

        def looks(key: Any, context: Any) -> Any:
            asked.append(context.req_id)
            return look(key, context)

        monkeypatch.setattr(storage, "lookup", looks)
        assert ended(takers, start(takers, prompt(6))).completed_pages == 0, "it had been told of six"
        assert taker.look_up(keys) == 0 and takers.lookup(pb.PromptPages(tokens=prompt(6))).storage_pages == 0
        assert holder.request(keys) == 0 and holder.nothing_is_held()
        holder.compute(keys[:2])
        assert taker.look_up(keys) == 2 and holder.request(keys) == 2 and not asked
        assert holder.look_up(keys) == 6 and asked, "a request of its own has the others brought"


def test_vllms_two_threads_serve_strangers_in_turn_and_no_other_thread_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One steps, one polls each millisecond: also for an engine that takes no step."""
    keys = keys_of(prompt(6))
    with pair() as (holder, _, taker, takers):
        holder.compute(keys)
        holder.wait(lambda: taker_sees(taker, takers))
        serve, look = holder.tier.serve_external_requests, holder.manager.primary_tier.lookup
        inside, served, looked, wrong = list[str](), set[str](), set[str](), list[str]()

        def serves(parent: Any) -> None:
            name = threading.current_thread().name
            if inside or not holder.manager.lock.locked():
                wrong.append(f"{name} beside {inside}")
            inside.append(name)
            serve(parent)
            inside.remove(name)
            served.add(name)

        def looks(*arguments: Any) -> Any:
            looked.add(threading.current_thread().name)
            return look(*arguments)

        monkeypatch.setattr(holder.tier, "serve_external_requests", serves)
        monkeypatch.setattr(holder.manager.primary_tier, "lookup", looks)
        for idle in (False, True):
            for _ in range(5):
                taker.empty_host()
                assert taker.look_up(keys) == 6
            if not idle:
                assert len(served) == 2
                holder.stop_stepping()
                served.clear()
        assert served == {POLLS} and POLLS in looked and len(looked) <= 2 and not wrong


def test_a_holder_that_empties_its_cache_while_it_lends_ends_no_engine(tmp_path: Path) -> None:
    keys = keys_of(prompt(8))
    with pair() as (holder, _, taker, takers):
        holder.compute(keys)
        comes(taker, takers, prompt(8))
        over = threading.Event()

        def empty() -> None:
            while not over.is_set():
                holder.empty_host()
                holder.compute(keys)

        emptying = threading.Thread(target=empty)
        emptying.start()
        try:
            for _ in range(10):
                taker.empty_host()
                operation = ended(takers, start(takers, prompt(8)))
                assert taker.request(keys[: operation.completed_pages]) == operation.completed_pages
        finally:
            over.set()
            emptying.join()  # what it computed last is there
        taker.empty_host()
        assert comes(taker, takers, prompt(8)).completed_pages == 8
        holder.wait(holder.nothing_is_held)


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[LentChunks]:
    """Of the engines that are opened."""
    made: list[LentChunks] = []

    def lends(*arguments: Any) -> LentChunks:
        made.append(LentChunks(*arguments))
        return made[-1]

    monkeypatch.setattr(orders, "LentChunks", lends)
    return made


def test_a_cache_is_emptied_once_nothing_of_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lent: list[LentChunks]
) -> None:
    """What vLLM gives away before is copied with other bytes, or vLLM ends with an assert."""
    monkeypatch.setattr(orders, "_CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(orders, "_SAY_SECONDS", 0.1)
    tokens = prompt(6)
    with offloading(tmp_path) as (engine, _):
        engine.compute(keys_of(tokens))
        copying, copied, emptied = threading.Event(), threading.Event(), threading.Event()

        def lend() -> None:
            with lent[0].reading([each[:-4].hex() for each in keys_of(tokens)]) as chunks:
                assert len(chunks) == 6
                copying.set()
                copied.wait(20.0)

        def empty() -> None:
            engine.empty_host()
            emptied.set()

        lending, emptying = threading.Thread(target=lend), threading.Thread(target=empty)
        lending.start()
        assert copying.wait(10.0)
        emptying.start()
        assert not emptied.wait(0.5)
        copied.set()
        assert emptied.wait(10.0)
        lending.join()
        emptying.join()
        assert engine.nothing_is_held()


@pytest.mark.parametrize("copied", [True, False])
def test_vllms_memory_stays_where_a_chunk_may_still_be_copied(monkeypatch: pytest.MonkeyPatch, copied: bool) -> None:
    kept: list[memoryview] = []
    monkeypatch.setattr(orders, "keep_mapped", kept.append)
    with offloading(None, data_plane="shm", pull=PULL) as (engine, _), monkeypatch.context() as patched:
        close = Staging.close
        patched.setattr(Staging, "close", lambda memory, seconds: close(memory, seconds) and copied)
        engine.tier.shutdown()
    assert len(kept) == (not copied)


def test_a_holder_that_is_gone_costs_a_miss(tmp_path: Path) -> None:
    keys = keys_of(prompt(4))
    with pair() as (holder, _, taker, takers):
        holder.compute(keys)
        comes(taker, takers, prompt(4))
        holder.tier.shutdown()
        taker.empty_host()
        operation = ended(takers, start(takers, prompt(4)))
        # FAILED where it is asked for what it said a moment ago, DECLINED where it is asked anew.
        assert operation.state in (pb.OPERATION_STATE_FAILED, pb.OPERATION_STATE_DECLINED)
        assert operation.completed_pages == 0
        taker.wait(taker.nothing_is_held)


def test_a_copy_that_hangs_fails_the_emptying_of_the_cache_and_the_engine_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lent: list[LentChunks]
) -> None:
    """What is being read stays what it was."""
    monkeypatch.setattr(orders, "_HUNG_SECONDS", 0.3)
    monkeypatch.setattr(orders, "_SAY_SECONDS", 0.1)
    keys = keys_of(prompt(6))
    with offloading(tmp_path) as (engine, client):
        engine.compute(keys)
        with lent[0].reading(hashes_of(keys)) as chunks:
            assert len(chunks) == 6
            with pytest.raises(StorageFailed, match="cannot be emptied now: chunks are still being copied"):
                engine.empty_host()
            assert "still being copied" in caplog.text and engine.request(keys) == 6
            assert client.lookup(pb.PromptPages(tokens=prompt(6)), without_storage=True).host_pages == 6
        engine.wait(engine.nothing_is_held)
        engine.empty_host()
        assert engine.request(keys) == 0


def test_a_pin_that_vllm_makes_after_the_caller_left_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "_BEING_ANSWERED_SECONDS", 0.05)
    asked, left, given_back = questions.Questions(lambda: None), threading.Event(), threading.Event()

    def pin(parent: Any) -> str:
        assert left.wait(10.0)
        return "pinned"

    def answer() -> None:
        while not given_back.wait(0.001):
            asked.answer(None)

    engine = threading.Thread(target=answer)
    engine.start()
    try:
        with pytest.raises(PeerUnreachable):
            asked.ask(pin, 0.05, lambda job: given_back.set() if job == "pinned" else None)
        assert not given_back.is_set()
        left.set()
        assert given_back.wait(10.0)
    finally:
        left.set()
        given_back.set()
        engine.join()


def test_pulls_without_a_tier_that_takes_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="peers"), offloading(tmp_path) as (engine, _):
        engine.tier._pulls(engine.tier._offloading_spec)


def test_a_lookup_counts_what_other_engines_have(tmp_path: Path) -> None:
    with pair() as (holder, _, taker, takers):
        holder.compute(keys_of(prompt(5)))
        holder.wait(lambda: taker_sees(taker, takers))
        found = takers.lookup(pb.PromptPages(tokens=prompt(5)))
        assert (found.host_pages, found.storage_pages, found.page_tokens) == (0, 5, BLOCK)


def test_many_questions_do_not_hold_vllm_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not come to be answered in its time is answered in the next round."""
    now = [0.0]
    monkeypatch.setattr(questions, "time", SimpleNamespace(monotonic=lambda: now[0]))
    asked, rounds = questions.Questions(lambda: None), list[int]()

    def take(parent: Any) -> None:
        now[0] += 0.6 * questions.ANSWERING_SECONDS
        rounds[-1] += 1

    asking = [threading.Thread(target=asked.ask, args=(take, SECONDS)) for _ in range(5)]
    for each in asking:
        each.start()
    wait_until(lambda: len(asked) == len(asking))
    while len(asked):
        rounds.append(0)
        asked.answer(cast(Any, None))
    assert rounds == [2, 2, 1]
    for each in asking:
        each.join()


def test_a_long_question_does_not_hold_vllm_for_all_of_it() -> None:
    """Each part is one time under vLLM's lock."""
    asked, looked, over = questions.Questions(lambda: None), list[int](), threading.Event()
    keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(3 * questions.KEYS_OF_A_QUESTION)]
    here = 2 * questions.KEYS_OF_A_QUESTION + 7

    class Host:
        """Has the leading chunks."""

        def on_new_request(self, context: Any) -> None:
            looked.append(0)

        def on_request_finished(self, context: Any) -> None: ...

        def lookup(self, key: bytes, context: Any) -> LookupResult:
            looked[-1] += 1
            return LookupResult.HIT if int.from_bytes(key[:32], "big") < here else LookupResult.MISS

    def answer() -> None:
        while not over.wait(0.001):
            asked.answer(cast(Any, Host()))

    engine = threading.Thread(target=answer)
    engine.start()
    try:
        names = SimpleNamespace(keys=lambda hashes: keys)
        lent = LentChunks(asked, cast(Any, names), 0, 1, lambda job: None)
        assert lent.count([]) == here
    finally:
        over.set()
        engine.join()
    assert looked == [questions.KEYS_OF_A_QUESTION] * 2 + [8]


def hashes_of(keys: Sequence[OffloadKey]) -> tuple[str, ...]:
    return tuple(get_offload_block_hash(key).hex() for key in keys)


def named(hashes: Sequence[str]) -> list[OffloadKey]:
    return [make_offload_key(bytes.fromhex(each), 0) for each in hashes]


def test_a_step_looks_at_some_chunks_of_a_long_order() -> None:
    """All of them that are in the host are pinned in the end, and none twice."""
    keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(4 * LOOKUPS_OF_A_STEP)]
    here, on_device = 3 * LOOKUPS_OF_A_STEP + 5, LOOKUPS_OF_A_STEP + 3
    looked, pinned = [0], list[bytes]()

    class Host:
        """Has leading chunks, and no tier has others."""

        def on_new_request(self, context: Any) -> None: ...

        def on_request_finished(self, context: Any) -> None: ...

        def lookup(self, key: bytes, context: Any) -> LookupResult:
            looked[-1] += 1
            return LookupResult.HIT if int.from_bytes(key[:32], "big") < here else LookupResult.MISS

        def create_store_job(self, keys: Any, context: Any) -> Any:
            pinned.extend(keys)
            return SimpleNamespace(keys=keys)

    engine_orders = EngineOrders(PrefetchLimits(threshold_tokens=1), 16, lambda: None)
    operation = engine_orders.start(Order(kind=OperationKind.PREFETCH, hashes=hashes_of(keys)))

    def leading_on_device(part: Sequence[bytes]) -> int:
        return sum(int.from_bytes(key[:32], "big") < on_device for key in part)

    promotion = Promotion(operation, named, engine_orders, lambda _: 1 << 20, 1, 16, on_device=leading_on_device)
    host: Any = Host()
    promotion.begin(host)
    while not promotion.step(host):
        looked.append(0)
    assert len(looked) == 4 and max(looked) <= LOOKUPS_OF_A_STEP + 2
    assert pinned == keys[:here] and promotion.held == here


def test_a_pin_that_nobody_gets_is_let_go() -> None:
    """vLLM would wait for it before it empties its host cache, for ever."""
    done = list[Any]()

    class Host:
        def on_new_request(self, context: Any) -> None: ...

        def on_request_finished(self, context: Any) -> None:
            raise KeyError(context.req_id)

        def lookup(self, key: bytes, context: Any) -> LookupResult:
            return LookupResult.HIT

        def create_store_job(self, keys: Any, context: Any) -> Any:
            return SimpleNamespace(keys=keys, chunk_ids=[0])

    asked, over = questions.Questions(lambda: None), threading.Event()

    def answer() -> None:
        while not over.wait(0.001):
            asked.answer(cast(Any, Host()))

    engine = threading.Thread(target=answer)
    engine.start()
    try:
        names = cast(Any, SimpleNamespace(keys=lambda hashes: keys_of(prompt(1))))
        lent = LentChunks(asked, names, 0, 1, done.append)
        with pytest.raises(KeyError, match="kvgrpc-lend"), lent.reading(["aa"]):
            pass
        assert lent.wait_idle(0.0) and len(done) == 1
    finally:
        over.set()
        engine.join()


def test_promotions_that_begin_together_keep_their_share() -> None:
    """Each pins and fills only in steps after all have begun."""
    share, heads, several, coming = 6, 2, list[Promotion](), set[bytes]()

    class Host:
        """Has the head of each prompt; a tier has the others, which are on their way."""

        def on_new_request(self, context: Any) -> None: ...

        def on_request_finished(self, context: Any) -> None: ...

        def lookup(self, key: bytes, context: Any) -> LookupResult:
            if key[31] < heads:
                return LookupResult.HIT
            if context.load_tier_filter is not NEAR:
                coming.add(key)
            return LookupResult.HIT_PENDING if key in coming else LookupResult.MISS

        def create_store_job(self, keys: Any, context: Any) -> Any:
            return SimpleNamespace(keys=keys)

    engine_orders = EngineOrders(PrefetchLimits(threshold_tokens=1), 16, lambda: None)

    def room(promotion: Promotion) -> int:
        return share - sum(each.held for each in several if each is not promotion)

    host: Any = Host()
    for number in range(3):
        keys = [make_offload_key(bytes([*[number] * 31, index]), 0) for index in range(12)]
        operation = engine_orders.start(Order(kind=OperationKind.PREFETCH, hashes=hashes_of(keys)))
        several.append(Promotion(operation, named, engine_orders, room, 1, 16))
        several[-1].begin(host)
    over = [promotion.step(host) for promotion in several]
    assert len(coming) == share and [each.held for each in several] == [heads + share, 0, 0]
    assert [len(each.pinned) for each in several] == [1, 0, 0] and over == [False, True, True]
