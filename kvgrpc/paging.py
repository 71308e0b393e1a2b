"""Page tokens: opaque to clients, refused when they were not made here for the same question."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence

from kvgrpc.errors import InvalidRequest

DEFAULT_PAGE = 100
MAX_PAGE = 1000
_CHECK_BYTES = 4


def page_size(asked: int) -> int:
    """Entries on a page of any list: DEFAULT_PAGE for 0; above the bound it is the bound (AIP-158)."""
    return min(asked or DEFAULT_PAGE, MAX_PAGE)


def page_token(question: str, after: str) -> str:
    """Continues the list that ``question`` names (method and filters) behind the entry ``after``."""
    text = after.encode()
    return base64.urlsafe_b64encode(_check(question, text) + text).decode()


def read_page_token(question: str, token: str) -> str:
    """The entry to continue behind; "" for the empty token. Raises InvalidRequest for a token that is not ours."""
    if not token:
        return ""
    try:
        raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        check, text = raw[:_CHECK_BYTES], raw[_CHECK_BYTES:]
        if text and check == _check(question, text):
            return text.decode()
    except (binascii.Error, UnicodeError):
        pass
    raise not_ours(token)


def numbers_token(question: str, after: Sequence[int]) -> str:
    """``page_token`` of a list that is ordered by tuples of numbers."""
    return page_token(question, ",".join(map(str, after)))


def read_numbers_token(question: str, token: str, count: int) -> tuple[int, ...] | None:
    """The ``count`` numbers to continue behind; None for the empty token. Raises InvalidRequest for one not ours."""
    text = read_page_token(question, token)
    if not text:
        return None
    try:
        numbers = tuple(map(int, text.split(",")))
    except ValueError:
        raise not_ours(token) from None
    if len(numbers) != count:
        raise not_ours(token)
    return numbers


def _check(question: str, text: bytes) -> bytes:
    return zlib.crc32(text, zlib.crc32(question.encode())).to_bytes(_CHECK_BYTES, "big")


def not_ours(token: str) -> InvalidRequest:
    """A token that no list of ours gave."""
    return InvalidRequest.of(
        "page_token", token[:100], "a next_page_token of the same list with the same filters, or empty"
    )
