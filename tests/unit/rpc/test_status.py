"""Exceptions survive the way into a status and back, whatever they hold; other people's statuses do no harm."""

from __future__ import annotations

from typing import Any

import grpc
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.errors import KvGrpcError, PeerUnreachable, Reason, Violation, exception_of
from kvgrpc.prefetch.storage.base import StorageDown
from kvgrpc.rpc.status import DETAILS_KEY, MAX_ENCODED_MESSAGE_BYTES, MAX_STATUS_BYTES, error_from, trailing

REASONS = st.sampled_from([reason for reason in Reason if reason])
# Lone surrogates too: they come from file names and from other people's texts.
ANY_TEXT = st.text(st.characters(), max_size=3000)
SHORT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


class Failed(grpc.RpcError):
    """What a caller of grpc would catch."""

    def __init__(self, code: grpc.StatusCode, text: str, metadata: Any) -> None:
        self._parts = code, text, metadata

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> Any:
        return self._parts[2]


def there_and_back(error: KvGrpcError) -> KvGrpcError:
    return error_from(Failed(*trailing(error)))


@given(
    REASONS,
    SHORT.filter(bool),
    st.dictionaries(SHORT, SHORT, max_size=8),
    st.none() | st.integers(0, 10**7).map(lambda milliseconds: milliseconds / 1000),
    st.lists(st.builds(Violation, SHORT, SHORT), max_size=8),
)
def test_what_is_small_is_kept_exactly(
    reason: Reason, message: str, metadata: dict[str, str], retry_after: float | None, violations: list[Violation]
) -> None:
    error = exception_of(reason)(message, metadata=metadata, retry_after=retry_after, violations=violations)
    back = there_and_back(error)
    assert type(back) is type(error)
    assert (back.message, back.metadata, back.code) == (message, metadata, error.code)
    assert (back.retry_after, back.violations) == (retry_after, tuple(violations))


@given(
    REASONS,
    ANY_TEXT,
    st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=40),
    st.none() | st.floats(-1e9, 1e9),
    st.lists(st.builds(Violation, ANY_TEXT, ANY_TEXT), max_size=40),
)
def test_what_is_too_large_is_cut_and_keeps_its_reason(
    reason: Reason, message: str, metadata: dict[str, str], retry_after: float | None, violations: list[Violation]
) -> None:
    error = exception_of(reason)(message, metadata=metadata, retry_after=retry_after, violations=violations)
    _, text, ((key, details),) = trailing(error)
    assert key == DETAILS_KEY
    assert len(details) <= MAX_STATUS_BYTES
    encoded = sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in text.encode())
    assert encoded <= MAX_ENCODED_MESSAGE_BYTES
    back = there_and_back(error)
    assert type(back) is type(error)
    assert (back.retry_after is None) == (retry_after is None)


@given(st.binary(max_size=200), st.sampled_from(list(grpc.StatusCode)))
def test_foreign_details_of_any_kind_give_a_bare_error_with_the_code(details: bytes, code: grpc.StatusCode) -> None:
    error = error_from(Failed(code, "text", ((DETAILS_KEY, details),)))
    assert (type(error), error.code, error.message) == (KvGrpcError, code.name, "text")


def test_what_lies_beside_the_details_is_not_read() -> None:
    (ours,) = trailing(PeerUnreachable("nobody there", metadata={"address": "a:1"}))[2]
    others = (("other-bin", b"not ours"), (DETAILS_KEY, "text"))
    assert type(error_from(Failed(grpc.StatusCode.UNAVAILABLE, "", (*others, ours)))) is PeerUnreachable


def test_a_status_without_details_says_its_code() -> None:
    error = error_from(Failed(grpc.StatusCode.UNAVAILABLE, "", None))
    assert (error.reason, error.code, error.message) == (Reason.UNSPECIFIED, "UNAVAILABLE", "UNAVAILABLE")
    assert error.metadata == {"grpcCode": "UNAVAILABLE"}


def test_an_error_of_no_call_at_all_is_decoded_too() -> None:
    assert error_from(grpc.RpcError()).code == "UNKNOWN"


def test_a_narrower_exception_with_the_code_of_its_reason_is_not_taken_for_what_was_sent() -> None:
    assert StorageDown.code == PeerUnreachable.code
    assert type(there_and_back(PeerUnreachable("nobody there", metadata={"address": "a:1"}))) is PeerUnreachable
