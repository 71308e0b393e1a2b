"""Prefill and decode of the published SGLang wheel over kvgrpc: the tokens are those of transformers."""

from __future__ import annotations

import math
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.v1 import common_pb2, transfer_service_pb2
from tests.engines.engine import PAGE, Pair, Request
from tests.engines.model import Case, Reference
from tests.engines.stages import MOST_TRIES, Asked, check_unseen, is_over, wait_for

pytestmark = pytest.mark.timeout(220)
FAKE_HOST = "2.2.2.2"


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[Pair]:
    pair = Pair(folder, reference.path, decode={"disaggregation_decode_enable_radix_cache": True})
    yield pair.wait_ready()
    pair.close()


@pytest.mark.parametrize("length", [3, PAGE, PAGE + 1, 100, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: Pair, reference: Reference, length: int) -> None:
    assert check_unseen(pair, reference.case(length)) == (0, math.ceil(length / PAGE))


def test_the_engines_logs_say_where_their_ranks_are(pair: Pair) -> None:
    for role, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
        (address,) = re.findall(rf"{role} rank \S+ listens on (\S+), ", engine.log())
        with SyncClient(address) as client:
            assert client.get_rank().role == common_pb2.Role.Value(f"ROLE_{role.upper()}")


def test_chunks_of_a_prompt_go_while_the_rest_is_computed(pair: Pair, reference: Reference) -> None:
    """Seen in prefill's room, which may be over before anybody looks: then with another prompt."""
    done = set[int]()

    def look(room: transfer_service_pb2.Room) -> bool:
        done.update(part.pages_done for part in room.parts if part.pages_done < room.pages)
        return is_over(room)

    for _ in range(MOST_TRIES):
        case, room = reference.case(400), pair.room()
        prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens), room)
        wait_for(pair.prefill, room, look, decode)
        assert (prefill.result(), decode.result()) == (case.tokens[:1], case.tokens)
        if done - {0}:
            return
    raise AssertionError(f"all pages came at once\n{pair.prefill.log_tail()}")


def test_decode_takes_only_what_it_does_not_hold(pair: Pair, reference: Reference) -> None:
    first = reference.case(12 * PAGE)
    assert check_unseen(pair, first) == (0, 12)
    assert pair.prefill.is_empty()  # so that all that is cached from here on is cached at decode
    second = reference.case(15 * PAGE + 3, prefix=first.prompt[: 10 * PAGE])
    assert check_unseen(pair, second) == (10 * PAGE, 16 - 10)


def test_a_prompt_that_decode_holds_whole_needs_no_page(pair: Pair, reference: Reference) -> None:
    case = reference.case(8 * PAGE)
    assert check_unseen(pair, case) == (0, 8)
    assert pair.prefill.is_empty()
    assert check_unseen(pair, case) == (8 * PAGE, 0)


def test_a_room_that_is_used_twice_fails_only_the_second(pair: Pair, reference: Reference) -> None:
    case, room = reference.case(300), pair.room()
    first = pair.submit_unseen(case.prompt, 8, room)
    second = pair.submit_unseen(case.prompt, 8, room)
    assert first[1].result() == case.tokens
    assert "ROOM_CONFLICT" in second[0].failure() or "ROOM_CONFLICT" in second[1].failure()


@pytest.mark.parametrize("samples", [2, 5])
def test_parallel_samples_of_a_request_are_attempts_of_its_room(pair: Pair, reference: Reference, samples: int) -> None:
    """As requests beside it are served, and with a room that nobody chose for them."""
    case, other = reference.case(100), reference.case(64)
    both = pair.submit_samples(case.prompt, 8, samples, pair.room())
    beside = pair.submit_unseen(other.prompt, 8)
    for request in both:
        request.result()
    assert both[1].value == [case.tokens[:8]] * samples
    assert beside[1].result() == other.tokens[:8]
    assert pair.prefill.is_empty() and pair.decode.is_empty()


def test_room_zero_is_refused_with_a_reason(pair: Pair, reference: Reference) -> None:
    for request in pair.submit(reference.case(20).prompt, 8, 0):
        reason = request.failure(5)
        assert "INVALID_REQUEST" in reason and "1 to 2^63-1" in reason


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_client_that_gives_up_at_one_side_ends_the_request_at_the_other_with_the_reason(
    pair: Pair, reference: Reference, side: str
) -> None:
    """Asked at the other side only then: what is heard is what was left behind."""
    asked = Asked(pair, reference.case(100), pair.room())
    if side == "prefill":
        given_up = asked.ask_prefill()
        wait_for(pair.prefill, asked.number, lambda found: found.local_handle)
    else:
        given_up = asked.ask_decode()
        wait_for(pair.prefill, asked.number, lambda found: found.pages > 0)
    given_up.engine.abort(given_up)
    assert given_up.wait() and given_up.error is not None
    other = asked.ask_decode() if side == "prefill" else asked.ask_prefill()
    assert "ROOM_CANCELLED" in other.failure()
    assert pair.prefill.is_empty() and pair.decode.is_empty()


def test_warm_up_requests_pass_by(pair: Pair, reference: Reference) -> None:
    case = reference.case(40)
    fake = {"bootstrap_host": FAKE_HOST, "bootstrap_room": 0}
    assert pair.prefill.generate(case.prompt, 1, **fake).result() == case.tokens[:1]
    assert len(pair.decode.generate(case.prompt, 4, **fake).result()) == 4


def test_a_registry_that_nobody_allowed_is_not_dialled(pair: Pair, reference: Reference) -> None:
    where = {"bootstrap_host": "192.0.2.7", "bootstrap_port": 8998, "bootstrap_room": pair.room()}
    reason = pair.decode.generate(reference.case(20).prompt, 4, **where).failure(5)
    assert "ADDRESS_NOT_ALLOWED" in reason and "KVGRPC_BOOTSTRAP_ALLOW" in reason


def test_two_hundred_requests_with_random_cancels_leave_both_pools_empty(pair: Pair, reference: Reference) -> None:
    draw = random.Random(4)
    cases = [reference.case(draw.choice([5, PAGE, 70, 200])) for _ in range(20)]
    wrong: list[tuple[Case, object]] = []
    places, finished, lock = threading.Semaphore(8), [0], threading.Lock()

    def one(case: Case, cancel_after: float | None) -> None:
        with places:
            prefill, decode = pair.submit_unseen(case.prompt, 8)
            if cancel_after is not None and not decode.wait(cancel_after):
                for request in draw_sides((prefill, decode), cancel_after):
                    request.engine.abort(request)
            assert decode.wait() and prefill.wait(), "a request did not end"
            with lock:
                finished[0] += decode.error is None
                if decode.error is None and decode.tokens != case.tokens:
                    wrong.append((case, decode.tokens))
                if decode.error is not None and cancel_after is None:
                    wrong.append((case, decode.error))

    cancels = [draw.uniform(0, 0.15) if draw.random() < 0.3 else None for _ in range(200)]
    threads = [threading.Thread(target=one, args=(draw.choice(cases), cancel)) for cancel in cancels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert wrong == []
    assert finished[0] >= 100
    assert pair.prefill.is_empty() and pair.decode.is_empty()


def draw_sides(sides: tuple[Request, ...], moment: float) -> tuple[Request, ...]:
    """Which of the two a client gave up: prefill alone, decode alone, both."""
    return (sides[:1], sides[1:], sides)[int(moment * 1e6) % 3]


def test_another_model_of_the_same_shape_is_refused_with_the_field(
    pair: Pair, reference: Reference, folder: Path
) -> None:
    """Its pages would fit, and its tokens would be nonsense."""
    other_model = Reference(folder / "another", seed=1).renamed("other")
    other = pair.start_decode_beside(model_path=str(other_model))
    try:
        prefill, decode = pair.submit(reference.case(100).prompt, 4, decode=other)
        reason = decode.failure(15)
        assert "PARALLEL_LAYOUT_MISMATCH" in reason and "model.name: prefill model, decode other" in reason
        pair.prefill.abort(prefill)
        assert prefill.wait(5)
    finally:
        other.close()
    check_unseen(pair, reference.case(50))


def test_pages_of_decode_that_are_twice_as_large_are_filled_by_two(pair: Pair, reference: Reference) -> None:
    other = pair.start_decode_beside(page_size=2 * PAGE)
    try:
        for length in (3, PAGE, PAGE + 1, 2 * PAGE + 1, 300):
            case = reference.case(length)
            prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens), decode=other)
            assert decode.result() == case.tokens
            assert prefill.result() == case.tokens[:1]
        assert other.is_empty()
    finally:
        other.close()


def test_another_page_size_is_refused_with_the_field(pair: Pair, reference: Reference) -> None:
    other = pair.start_decode_beside(page_size=PAGE // 2)
    try:
        prefill, decode = pair.submit(reference.case(100).prompt, 4, decode=other)
        assert "page_tokens: prefill 16, decode 8" in decode.failure(15)
        pair.prefill.abort(prefill)
        assert prefill.wait(5)
    finally:
        other.close()
    check_unseen(pair, reference.case(50))
