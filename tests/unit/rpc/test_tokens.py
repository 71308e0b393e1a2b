"""Tokens: the rule and its vectors, what a server takes of one, and secrets that cannot be used and are never shown."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.cli.main import main
from kvgrpc.errors import CredentialsExpired, CredentialsInvalid, InvalidRequest, KvGrpcError, WrongAudience
from kvgrpc.net import target_of
from kvgrpc.rpc.credentials import tokens
from kvgrpc.rpc.credentials.audience import Audiences
from kvgrpc.rpc.credentials.secrets import parse_tokens
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from tests.conformance.tokens.make_vectors import vectors
from tests.support.secrets import bearer, secret, tokens_of

VECTORS = Path(__file__).parents[2] / "conformance/tokens/vectors.json"
TARGET, PEER = "10.0.0.7:9001", "ipv4:10.0.0.9:41234"
AUDIENCES = Audiences([TARGET])
BOSS = ServerSecurity(tokens=tokens_of("operator:boss\nrank decode-7 role=decode:seven")).token_table()


@pytest.mark.parametrize("vector", json.loads(VECTORS.read_text()), ids=lambda vector: vector["address"])
def test_the_vectors_of_all_languages_hold(vector: dict[str, Any]) -> None:
    target = target_of(vector["address"])
    assert target == vector["target"]
    assert tokens.key_id(vector["secret"]) == vector["key_id"]
    assert tokens.audience_key(vector["secret"], target).hex() == vector["audience_key"]
    made = tokens.authorization(vector["secret"], target, vector["time"])
    assert made == vector["authorization"]
    read = tokens.BearerToken.read(made)
    assert (read.target, read.made_at, read.key_id) == (target, vector["time"], vector["key_id"])
    assert read.is_made_with(bytes.fromhex(vector["audience_key"]))


def test_the_file_of_vectors_is_what_its_maker_writes() -> None:
    assert json.loads(VECTORS.read_text()) == vectors()


class TestWhatAServerTakes:
    def test_a_token_for_it_of_now(self) -> None:
        token = BOSS.check(bearer("seven", TARGET), AUDIENCES, PEER)
        assert (token.name, token.engine_role) == ("decode-7", "decode")

    def test_one_for_another_target_is_told_what_to_do_once_its_secret_is_proven(self) -> None:
        with pytest.raises(WrongAudience) as refused:
            BOSS.check(bearer("boss", "10.0.0.66:9001"), AUDIENCES, PEER)
        assert refused.value.metadata == {"target": "10.0.0.66:9001", "audiences": TARGET}
        assert "KVGRPC_AUDIENCE" in refused.value.message
        with pytest.raises(CredentialsInvalid) as unknown:
            BOSS.check(bearer("nobody", "10.0.0.66:9001"), AUDIENCES, PEER)
        assert TARGET not in str(unknown.value), "who proves nothing learns no name"

    @pytest.mark.parametrize("age", [-60, 0, 60])
    def test_clocks_may_differ_by_a_minute(self, age: int) -> None:
        BOSS.check(tokens.authorization(secret("boss"), TARGET, int(time.time()) - age), AUDIENCES, PEER)

    @pytest.mark.parametrize("age", [-90, 62, 10**9])
    def test_and_not_by_more(self, age: int) -> None:
        with pytest.raises(CredentialsExpired) as refused:
            BOSS.check(tokens.authorization(secret("boss"), TARGET, int(time.time()) - age), AUDIENCES, PEER)
        assert refused.value.metadata["limitSeconds"] == "60" and "clocks" in refused.value.message

    def test_an_unknown_secret_and_a_wrong_proof_are_one_refusal(self) -> None:
        good = bearer("boss", TARGET)
        other = bearer("seven", TARGET)
        swapped = f"{good.rpartition('.')[0]}.{other.rpartition('.')[2]}"
        elsewhere = good.replace(good.split(".")[3], bearer("boss", "10.0.0.8:9001").split(".")[3])
        later = good.replace(good.split(".")[2], str(int(time.time()) + 30))
        refusals = {self.refusal(each) for each in (swapped, elsewhere, later, bearer("nobody", TARGET))}
        assert len(refusals) == 1 and refusals.pop().startswith("CREDENTIALS_INVALID")

    def refusal(self, header: str) -> str:
        with pytest.raises(KvGrpcError) as refused:
            BOSS.check(header, AUDIENCES, PEER)
        return str(refused.value)

    HALF = ("", "Bearer", "Bearer ", "Basic a2V5", "Bearer kvgrpc1", "Bearer kvgrpc1....", "Bearer kvgrpc1.x.y.z.w")
    STRANGE = ("kvgrpc1.é.1.MQ.MQ", "kvgrpc1.a.\u0661.MQ.MQ", "kvgrpc1.a.1._w.MQ", "kvgrpc1.a.1.M.MQ", "." * 9_999)
    PLAIN = (secret("boss"), f"kvgrpc1.{secret('boss')}", f"kvgrpc1.{secret('boss')}.1.MQ")

    @pytest.mark.parametrize("header", [*HALF, *(f"Bearer {each}" for each in (*STRANGE, *PLAIN))])
    def test_what_is_no_token_is_refused_and_not_repeated_a_plain_secret_above_all(self, header: str) -> None:
        said = self.refusal(header)
        assert said.startswith("CREDENTIALS_INVALID") and "kvgrpc token TARGET" in said
        assert secret("boss") not in said

    def test_every_changed_character_of_a_token_counts(self) -> None:
        good = bearer("boss", TARGET)
        for position in range(len("Bearer "), len(good)):
            changed = good[:position] + ("A" if good[position] != "A" else "B") + good[position + 1 :]
            if position == len(good) - 1:
                continue  # four of its six bits are none of the proof's
            assert self.refusal(changed)


class TestWhatAServerIsCalled:
    @pytest.mark.parametrize(
        ("bound", "target", "peer", "is_meant"),
        [
            ("127.0.0.1:9001", "127.0.0.1:9001", "ipv4:127.0.0.1:4", True),
            ("127.0.0.1:9001", "127.0.0.1:9001", "ipv4:10.0.0.9:4", False),
            ("127.0.0.1:9001", "127.0.0.2:9001", "ipv4:127.0.0.1:4", False),
            ("127.0.0.1:9001", "localhost:9001", "ipv4:127.0.0.1:4", False),
            ("localhost:9001", "localhost:9001", "ipv6:%5B::1%5D:4", True),
            ("unix:/run/a.sock", "unix:/run/a.sock", "unix:", True),
            ("unix:/run/a.sock", "unix:/run/a.sock", "ipv4:10.0.0.9:4", False),
            ("unix:/run/a.sock", "unix:/run/b.sock", "unix:", False),
            ("0.0.0.0:9001", "127.0.0.1:9001", "ipv4:127.0.0.1:4", True),
            ("0.0.0.0:9001", "127.0.0.1:9001", "ipv4:10.0.0.9:4", False),
            ("[::]:9001", "localhost:9001", "ipv6:%5B::1%5D:4", True),
            ("0.0.0.0:9001", "127.0.0.1:9002", "ipv4:127.0.0.1:4", False),
            ("0.0.0.0:9001", "192.0.2.1:9001", "ipv4:10.0.0.9:4", False),
            ("0.0.0.0:9001", "0.0.0.0:9001", "ipv4:127.0.0.1:4", False),
            ("0.0.0.0:9001", "some-name:9001", "ipv4:127.0.0.1:4", False),
            ("0.0.0.0:9001", "unix:/run/a:9001", "unix:", False),
            ("registry.svc:8998", "registry.svc:8998", "ipv4:10.0.0.9:4", True),
            ("[fd00::7]:9001", "[fd00::7]:9001", "ipv6:%5Bfd00::9%5D:4", True),
        ],
    )
    def test_by_what_it_bound(self, bound: str, target: str, peer: str, is_meant: bool) -> None:
        audiences = Audiences()
        audiences.add(bound)
        assert audiences.include(target, peer) is is_meant


@pytest.mark.parametrize("other", ["consumer:HUSH", "operator boss:HUSH", "rank p-*:HUSH"])
def test_one_secret_has_one_role_name_and_scope(other: str) -> None:
    with pytest.raises(InvalidRequest, match="lines 2 and 4") as refused:
        parse_tokens(f"# ours\noperator:HUSH\n\n{other}\n".replace("HUSH", secret("hush")))
    assert "hush" not in str(refused.value)


def test_a_line_that_is_there_twice_is_no_conflict() -> None:
    (token,) = parse_tokens("operator:HUSH\noperator: HUSH\n".replace("HUSH", secret("hush")))
    assert token.secret == secret("hush")


def test_a_secret_that_is_soon_guessed_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 16 characters") as refused:
        parse_tokens("operator:hush-hush-hush")
    assert refused.value.metadata["value"] == "'line 1'"


@pytest.mark.parametrize("content", ["", "# operator:hush\n"])
def test_a_file_that_lets_nobody_in_is_refused_at_the_start(content: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(content)
    with pytest.raises(InvalidRequest) as refused:
        ServerSecurity(token_file=str(file)).token_table()
    assert str(file) in str(refused.value) and "hush" not in str(refused.value)
    ServerSecurity(token_file=str(file), tokens=tokens_of("operator:other")).token_table()
    ServerSecurity(token_file=str(file), client_ca_file="ca.pem").token_table()


def test_a_file_that_becomes_empty_takes_its_tokens_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgrpc.rpc.credentials.reloading.CHECK_SECONDS", 0.0)
    file = tmp_path / "tokens"
    file.write_text(f"operator:{secret('hush')}")
    table = ServerSecurity(token_file=str(file)).token_table()
    monkeypatch.setattr(table._file, "_next_look", 0.0)
    table.check(bearer("hush", TARGET), AUDIENCES, PEER)
    file.write_text("")
    with pytest.raises(CredentialsInvalid):
        table.check(bearer("hush", TARGET), AUDIENCES, PEER)


def test_a_header_is_made_anew_for_each_second_and_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    said, seconds = [secret("a")], [1_764_000_000.2]
    monkeypatch.setattr(time, "time", lambda: seconds[0])
    source = tokens.HeaderSource(lambda: said[0], TARGET)
    first = source()
    assert source() == first
    seconds[0] += 1
    second = source()
    said[0] = secret("b")
    assert len({first, second, source()}) == 3


UNUSABLE = [(" ", "nothing"), ("hush hush", "white space"), ("hüsh", "not ASCII"), ("hu\x07sh", "control characters")]


@pytest.mark.parametrize(("content", "wrong"), [("", "nothing"), *UNUSABLE])
def test_a_file_without_a_usable_token_is_named(content: str, wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "own"
    file.write_text(content)
    with pytest.raises(InvalidRequest) as refused:
        ClientSecurity(token_file=str(file)).header_source("127.0.0.1:1")
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
