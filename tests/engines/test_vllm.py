"""Prefill and decode of the published vLLM wheel over kvgrpc: the tokens are those of transformers."""

from __future__ import annotations

import json
import math
import random
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.engines.vllm.scheduler import UNUSED
from kvgrpc.v1 import common_pb2
from tests.engines.engine import LOCAL
from tests.engines.model import Case, Reference
from tests.engines.stages import MOST_TRIES, Asked, handed_over, wait_for
from tests.engines.vllm_engine import BLOCK, VllmEngine, VllmPair

pytestmark = pytest.mark.timeout(700)


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[VllmPair]:
    pair = VllmPair(folder, reference.path)
    pair.wait_ready()
    yield pair
    pair.close()


def check(pair: VllmPair, case: Case) -> int:
    """How many blocks were handed over. Decode is told another prompt: it has these tokens by such blocks alone, those
    of an earlier prompt that began alike among them."""
    room = pair.room()
    prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens), room)
    assert decode.result() == case.tokens
    assert prefill.result() == case.tokens[:1]
    return handed_over(pair, room)


@pytest.mark.parametrize("length", [3, BLOCK, BLOCK + 1, 100, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: VllmPair, reference: Reference, length: int) -> None:
    assert check(pair, reference.case(length)) == math.ceil(length / BLOCK)


def test_the_engines_logs_say_where_their_ranks_are(pair: VllmPair) -> None:
    for role, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
        (address,) = re.findall(rf"{role} rank \S+ listens on (\S+)", engine.log())
        with SyncClient(address) as client:
            assert client.get_rank().role == common_pb2.Role.Value(f"ROLE_{role.upper()}")


def test_decode_takes_only_what_it_does_not_hold(pair: VllmPair, reference: Reference) -> None:
    first = reference.case(6 * BLOCK)
    check(pair, first)
    assert pair.prefill.is_empty()  # so that all that is cached from here on is cached at decode
    assert check(pair, reference.case(9 * BLOCK + 3, prefix=first.prompt[: 5 * BLOCK])) == 10 - 5


def test_a_prompt_that_decode_holds_but_for_its_last_block_needs_that_block_only(
    pair: VllmPair, reference: Reference
) -> None:
    case = reference.case(4 * BLOCK)
    assert check(pair, case) == 4
    assert pair.prefill.is_empty()
    assert check(pair, case) == 1


def test_a_prompt_that_prefill_holds_is_handed_over_whole(pair: VllmPair, reference: Reference) -> None:
    case = reference.case(4 * BLOCK + 5)
    check(pair, case)
    assert pair.decode.is_empty()
    assert check(pair, case) == 5


def test_a_transfer_id_that_is_used_twice_fails_only_the_second(pair: VllmPair, reference: Reference) -> None:
    case, room = reference.case(300), pair.room()
    first = pair.submit_unseen(case.prompt, 8, room)
    second = pair.submit_unseen(case.prompt, 8, room)
    assert first[1].result() == case.tokens
    second[0].result()
    if not second[1].wait(2):  # it came when the first was through, and waits for a prefill that was refused
        pair.decode.abort(second[1])
    second[1].failure(5)
    assert "ROOM_CONFLICT" in pair.prefill.reason() + pair.decode.reason()
    assert pair.prefill.is_empty() and pair.decode.is_empty()


@pytest.mark.parametrize("at_prefill", [1, 3], ids=["prefill is asked for one", "prefill is asked for all"])
def test_parallel_samples_take_the_prompt_once(pair: VllmPair, reference: Reference, at_prefill: int) -> None:
    """Decode is told another prompt, but for the last block: who computed it would have other tokens."""
    case, room = reference.case(3 * BLOCK + 5), pair.room()
    told = [*reference.case(3 * BLOCK).prompt, *case.prompt[3 * BLOCK :]]
    prefill = pair.prefill.generate_samples(case.prompt, 1, at_prefill, **pair.at_prefill(room))
    decode = pair.decode.generate_samples(told, len(case.tokens), 3, **pair.at_decode(room))
    for request in (prefill, decode):
        request.result()
    assert decode.value["tokens"] == [case.tokens] * 3
    assert pair.prefill.is_empty() and pair.decode.is_empty()


@pytest.mark.parametrize("missing", ["transfer_id", "remote_bootstrap_addr"])
def test_a_request_that_names_no_hand_off_is_served_by_decode_alone(
    pair: VllmPair, reference: Reference, missing: str
) -> None:
    case = reference.case(40)
    params = {name: value for name, value in pair.at_decode(pair.room()).items() if name != missing}
    asked = pair.decode.generate(case.prompt, 8, **params)
    assert asked.result() == case.tokens
    assert f"without {missing}" in asked.value[UNUSED]
    assert "does not use what prefill computed" in pair.decode.log(), "a line of that sort, one in 30 s"


def test_an_ordinary_request_passes_by(pair: VllmPair, reference: Reference) -> None:
    case = reference.case(40)
    for engine in (pair.prefill, pair.decode):
        assert engine.generate(case.prompt, 8).result() == case.tokens


def test_a_registry_that_nobody_allowed_is_not_dialled(pair: VllmPair, reference: Reference) -> None:
    params = {**pair.at_decode(pair.room()), "remote_bootstrap_addr": "http://192.0.2.7:8998"}
    pair.decode.generate(reference.case(20).prompt, 4, **params).failure(5)
    assert "ADDRESS_NOT_ALLOWED" in pair.decode.reason() and "KVGRPC_BOOTSTRAP_ALLOW" in pair.decode.reason()


@pytest.mark.parametrize("address", ["", "http://", "not an address", "http://127.0.0.1:8998/a/b", 7, ["x"]])
def test_an_address_that_is_none_fails_that_request_alone(
    pair: VllmPair, reference: Reference, address: object
) -> None:
    params = {**pair.at_decode(pair.room()), "remote_bootstrap_addr": address}
    assert pair.decode.generate(reference.case(20).prompt, 4, **params).wait(10)
    check(pair, reference.case(50))


def test_a_decode_that_gives_up_has_its_blocks_back(pair: VllmPair, reference: Reference) -> None:
    """Prefill never hears of the request: decode waits for it until its client goes."""
    waiting = pair.submit_to_decode(reference.case(100).prompt, 8)
    assert not waiting.wait(1.0)
    pair.decode.abort(waiting)
    waiting.failure(5)
    assert pair.decode.is_empty()


def test_a_client_that_gives_up_at_prefill_ends_the_request_at_decode_with_the_reason(
    pair: VllmPair, reference: Reference
) -> None:
    """Seen in prefill's room, which may be over before anybody looks: then with another prompt."""
    for _ in range(MOST_TRIES):
        asked = Asked(pair, reference.case(480), pair.room())
        waiting, given_up = asked.ask_decode(), asked.ask_prefill()
        wait_for(pair.prefill, asked.number, lambda found: found.local_handle, waiting)
        pair.prefill.abort(given_up)
        assert given_up.wait() and waiting.wait(), f"{pair.prefill.log_tail()}\n{pair.decode.log_tail()}"
        if waiting.error is not None:
            assert f"room {asked.number}: ROOM_CANCELLED" in pair.decode.reason()
            assert pair.prefill.is_empty() and pair.decode.is_empty()
            return
        assert waiting.tokens == asked.case.tokens
    raise AssertionError(f"each prompt was computed before it was given up\n{pair.prefill.log_tail()}")


def test_a_prefill_whose_decode_was_given_up_gives_its_pages_back(pair: VllmPair, reference: Reference) -> None:
    case, room = reference.case(100), pair.room()
    waiting = pair.decode.generate(case.prompt, 8, **pair.at_decode(room))
    assert not waiting.wait(0.5)
    pair.decode.abort(waiting)
    waiting.failure(5)
    assert pair.prefill.generate(case.prompt, 1, **pair.at_prefill(room)).result() == case.tokens[:1]
    assert pair.prefill.is_empty() and pair.decode.is_empty()
    assert f"room {pair.number_of(room)}: ROOM_CANCELLED" in pair.prefill.reason()


def test_two_hundred_requests_with_random_cancels_leave_both_pools_empty(pair: VllmPair, reference: Reference) -> None:
    draw = random.Random(4)
    cases = [reference.case(draw.choice([5, BLOCK, 70, 200])) for _ in range(20)]
    places, finished, lock = threading.Semaphore(8), [0], threading.Lock()
    wrong: list[tuple[bool, Case, Any]] = []

    def one(case: Case, cancel_after: float | None) -> None:
        with places:
            prefill, decode = pair.submit_unseen(case.prompt, 8)
            if cancel_after is not None and not decode.wait(cancel_after):
                for request in ((prefill,), (decode,), (prefill, decode))[int(cancel_after * 1e6) % 3]:
                    request.engine.abort(request)
            ended = decode.wait() and prefill.wait()
            with lock:
                finished[0] += decode.error is None
                if not ended or (decode.error is None and decode.tokens != case.tokens):
                    wrong.append((ended, case, decode.tokens))
                if decode.error is not None and cancel_after is None:
                    wrong.append((ended, case, decode.error))

    cancels = [draw.uniform(0, 0.15) if draw.random() < 0.3 else None for _ in range(200)]
    threads = [threading.Thread(target=one, args=(draw.choice(cases), cancel)) for cancel in cancels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrong == []
    assert finished[0] >= 100
    assert pair.prefill.is_empty() and pair.decode.is_empty()
    check(pair, cases[0])


def test_the_registry_answers_where_the_proxy_looks_for_prefill(pair: VllmPair) -> None:
    with SyncClient(f"{LOCAL}:{pair.bootstrap_port}") as client:
        (engine,) = client.list_engines()
        assert engine.name == f"{LOCAL}-{pair.bootstrap_port}"


def test_the_bootstrap_port_tells_proxies_which_engine_is_there(pair: VllmPair) -> None:
    with urllib.request.urlopen(f"http://{LOCAL}:{pair.bootstrap_port}/query", timeout=5) as answer:
        ranks = json.load(answer)
    assert {rank: entry["engine_id"] for rank, entry in ranks.items()} == {"0": pair.engine_ids["prefill"]}


def test_a_connection_that_says_nothing_sensible_harms_nobody(pair: VllmPair, reference: Reference) -> None:
    for words in (b"", b"GET /", b"GET /query", b"POST /register HTTP/1.1\r\n\r\n", b"\0" * 100_000):
        with socket.create_connection((LOCAL, pair.bootstrap_port), 5) as connection:
            connection.sendall(words)
    check(pair, reference.case(50))


def test_another_model_of_the_same_shape_is_refused_with_the_field(
    pair: VllmPair, reference: Reference, folder: Path
) -> None:
    """Its blocks would fit, and its tokens would be nonsense."""
    other_model = Reference(folder / "another", seed=1).renamed("other")
    other = pair.start_decode_beside(model=str(other_model))
    assert isinstance(other, VllmEngine)
    try:
        room = pair.room()
        pair.prefill.generate(reference.case(100).prompt, 1, **pair.at_prefill(room)).result()
        other.generate(reference.case(100).prompt, 4, **pair.at_decode(room)).failure(15)
        assert "PARALLEL_LAYOUT_MISMATCH" in other.reason()
        assert "model.name: prefill model, decode other" in other.reason()
    finally:
        other.close()
    check(pair, reference.case(50))
