"""Tokens that cannot be used: what is said of them, and never the secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgrpc.cli.main import main
from kvgrpc.errors import InvalidRequest
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity, Token, TokenTable, parse_tokens


@pytest.mark.parametrize("other", ["consumer:hush", "operator boss:hush", "rank p-*:hush"])
def test_one_secret_has_one_role_name_and_scope(other: str) -> None:
    with pytest.raises(InvalidRequest, match="lines 2 and 4") as refused:
        parse_tokens(f"# ours\noperator:hush\n\n{other}\n")
    assert "hush" not in str(refused.value)


def test_a_line_that_is_there_twice_is_no_conflict() -> None:
    (token,) = parse_tokens("operator:hush\noperator: hush\n")
    assert token.secret == "hush"


@pytest.mark.parametrize("content", ["", "# operator:hush\n"])
def test_a_file_that_lets_nobody_in_is_refused_at_the_start(content: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    with pytest.raises(InvalidRequest) as refused:
        TokenTable(ServerSecurity(token_file=str(file)))
    assert str(file) in str(refused.value) and "hush" not in str(refused.value)
    (other,) = parse_tokens("operator:other")
    TokenTable(ServerSecurity(token_file=str(file), tokens=(other,)))
    TokenTable(ServerSecurity(token_file=str(file), client_ca_file="ca.pem"))


def test_a_file_that_becomes_empty_takes_its_tokens_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgrpc.rpc.reloading.CHECK_SECONDS", 0.0)
    file = tmp_path / "tokens"
    file.write_text("operator:hush")
    table = TokenTable(ServerSecurity(token_file=str(file)))
    monkeypatch.setattr(table._file, "_next_look", 0.0)
    assert isinstance(table.find("Bearer hush"), Token)
    file.write_text("")
    assert table.find("Bearer hush") is None


UNUSABLE = [(" ", "nothing"), ("hush hush", "white space"), ("hüsh", "not ASCII"), ("hu\x07sh", "control characters")]


@pytest.mark.parametrize(("content", "wrong"), [("", "nothing"), *UNUSABLE])
def test_a_file_without_a_usable_token_is_named(content: str, wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "own"
    file.write_text(content)
    with pytest.raises(InvalidRequest) as refused:
        ClientSecurity(token_file=str(file)).token_source()
    assert f"{file}: " in str(refused.value) and wrong in str(refused.value) and "sh" not in str(refused.value)


@pytest.mark.parametrize(("content", "wrong"), UNUSABLE)
def test_a_variable_without_a_usable_token_is_named(
    content: str, wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVGRPC_TOKEN", content)
    with pytest.raises(SystemExit):
        main(["sessions"])
    said = capsys.readouterr().err
    assert said.startswith("INVALID_REQUEST: KVGRPC_TOKEN: ") and wrong in said and "sh" not in said
