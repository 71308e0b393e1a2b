"""Tokens that cannot be used: what is said of them, and never the secret."""

from __future__ import annotations

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.rpc.security import parse_tokens


@pytest.mark.parametrize("other", ["consumer:hush", "operator boss:hush", "rank p-*:hush"])
def test_one_secret_has_one_role_name_and_scope(other: str) -> None:
    with pytest.raises(InvalidRequest, match="lines 2 and 4") as refused:
        parse_tokens(f"# ours\noperator:hush\n\n{other}\n")
    assert "hush" not in str(refused.value)


def test_a_line_that_is_there_twice_is_no_conflict() -> None:
    (token,) = parse_tokens("operator:hush\noperator: hush\n")
    assert token.secret == "hush"
