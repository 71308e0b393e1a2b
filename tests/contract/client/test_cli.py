"""The command ``kvgrpc`` against real servers in this process: what people see, and with which exit code it ends."""

from __future__ import annotations

import http.server
import json
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest

from kvgrpc.cli.main import COMMANDS, command, main
from kvgrpc.events import BlockStored, KVEventBatch
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server import RegistryServer
from tests.support.certificates import OPENSSL, Authority
from tests.support.rank_host import RankHost
from tests.support.secrets import secret, tokens_of
from tests.support.waiting import wait_until

HALF, STUCK = 2**63 - 25, 4242

ROOT = Path(__file__).parents[3]
# Lab books say what was typed on their day.
DOCUMENTS = (ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "lab"))


def documented_commands() -> list[str]:
    text = "\n".join(page.read_text() for page in DOCUMENTS)
    blocks = re.findall(r"^```\w*$(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return sorted(set(re.findall(r"^(?:\$ )?(kvgrpc .+)$", "".join(blocks), re.MULTILINE)))


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    lines: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Handoff:
    """A prefill with the registry in it and a decode: room HALF is on its way, room STUCK waits for its prefill."""

    prefill: RankHost
    decode: RankHost

    @property
    def prefill_address(self) -> str:
        return self.prefill.rank.address

    @property
    def decode_address(self) -> str:
        return self.decode.rank.address


@pytest.fixture(scope="module")
def handoff() -> Iterator[Handoff]:
    events = {"publisher": "null", "enable_kv_cache_events": True}
    prefill = RankHost("P", "PREFILL", {"registry": "embedded", "events": events, "lease_ttl": 1.0})
    decode = RankHost("D", "DECODE", {"registry": prefill.rank.address})
    prefill.fill(1)
    decode.receive(HALF, prefill.rank.address, range(8))
    prefill.send(HALF, range(8, 15), last=False)
    decode.wait("receivers", [HALF], [3])
    decode.receive(STUCK, prefill.rank.address, range(8, 12))
    for first in (1, 2, 3):
        prefill.rank.events.publish(KVEventBatch(time.time(), [BlockStored([first], None, [1, 2], 2)]))
    yield Handoff(prefill, decode)
    decode.close(2.0)
    prefill.close(2.0)


@pytest.fixture
def kvgrpc(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    def run(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        out, err = capsys.readouterr()
        lines = [json.loads(line) for line in out.splitlines()] if "--json" in arguments else []
        return Ended(int(exit_.value.code or 0), out, err, lines)

    return run


def test_help_names_every_command(kvgrpc: Callable[..., Ended]) -> None:
    ended = kvgrpc("--help")
    assert ended.code == 0
    assert [name for name in COMMANDS if f"\n  {name} " not in ended.out] == []


def test_engines_and_ranks_show_who_serves_what(kvgrpc: Callable[..., Ended], handoff: Handoff) -> None:
    engines = kvgrpc("engines", "-s", handoff.prefill_address)
    assert [name for name in ("P", "D", "prefill", "decode", "READY", "1/1") if name not in engines.out] == []
    ranks = kvgrpc("ranks", "-s", handoff.prefill_address, "--json")
    assert [row["endpoints"]["grpc"] for row in ranks.lines] == [handoff.decode_address, handoff.prefill_address]
    assert "P/dp0/pp0/cp0/tp0" in kvgrpc("ranks", "P", "-s", handoff.prefill_address).out


def test_engines_can_be_asked_for_by_role(kvgrpc: Callable[..., Ended], handoff: Handoff) -> None:
    ended = kvgrpc("engines", "--role", "decode", "-s", handoff.prefill_address, "--json")
    assert [line["name"] for line in ended.lines] == ["D"]


@pytest.mark.parametrize("command_name", ["engines", "ranks"])
def test_a_registry_that_warms_up_is_not_believed_to_know_everybody(
    kvgrpc: Callable[..., Ended], command_name: str
) -> None:
    registry = RegistryServer(["127.0.0.1:0"], lease_ttl=1.0).open()
    try:
        ended = kvgrpc(command_name, "-s", registry.address)
        assert (ended.code, ended.err) == (0, "the registry warms up: more may be there\n")
        assert kvgrpc(command_name, "-s", registry.address, "--json").lines == []
        wait_until(lambda: kvgrpc(command_name, "-s", registry.address).err == "")
        assert kvgrpc(command_name, "-s", registry.address, "--json").lines == []
    finally:
        registry.close()


def test_rooms_are_shown_on_prefill_and_on_decode(kvgrpc: Callable[..., Ended], handoff: Handoff) -> None:
    for address in (handoff.prefill_address, handoff.decode_address):
        rooms = kvgrpc("rooms", "-s", address, "--json")
        assert {line["room"]: line["state"] for line in rooms.lines}[str(HALF)] == "ROOM_STATE_TRANSFERRING"
    shown = kvgrpc("rooms", "-s", handoff.decode_address, "--state", "transferring")
    assert str(HALF) in shown.out and "7/8" in shown.out and str(STUCK) not in shown.out


def test_a_room_shows_its_parts(kvgrpc: Callable[..., Ended], handoff: Handoff) -> None:
    ended = kvgrpc("room", str(HALF), "-s", handoff.decode_address)
    assert [word for word in ("TRANSFERRING", "decode", "P/dp0/pp0/cp0/tp0") if word not in ended.out] == []


def test_sessions_name_the_peer_on_both_sides(kvgrpc: Callable[..., Ended], handoff: Handoff) -> None:
    assert handoff.prefill.rank.ref.rank.engine == "P"
    assert str(handoff.prefill.rank.ref) in kvgrpc("sessions", "--wide", "-s", handoff.decode_address).out
    assert str(handoff.decode.rank.ref) in kvgrpc("sessions", "--wide", "-s", handoff.prefill_address).out


def test_cancel_ends_a_room_with_its_cause(kvgrpc: Callable[..., Ended], handoff: Handoff) -> None:
    ended = kvgrpc("cancel", str(STUCK), "--cause", "it took too long", "-s", handoff.decode_address)
    assert ended.code == 0
    assert [word for word in ("FAILED", "ROOM_CANCELLED", "it took too long") if word not in ended.out] == []


def test_streams_and_events_show_what_was_published(kvgrpc: Callable[..., Ended], handoff: Handoff) -> None:
    streams = kvgrpc("streams", "-s", handoff.prefill_address, "--json")
    assert [line["nextSequence"] for line in streams.lines] == ["4"]  # the first says that nothing is cached
    replay = kvgrpc("events", "replay", "-s", handoff.prefill_address, "--json", "--from", "2")
    assert [line["sequence"] for line in replay.lines] == [2, 3]
    assert replay.lines[0]["events"][0]["block_hashes"] == [2]
    assert "BlockStored 1: 1" in kvgrpc("events", "replay", "-s", handoff.prefill_address).out


def test_info_and_health_of_a_rank(kvgrpc: Callable[..., Ended], handoff: Handoff) -> None:
    info = kvgrpc("info", "-s", handoff.decode_address)
    assert [word for word in (str(handoff.decode.rank.ref), "shm", "512", "float32") if word not in info.out] == []
    health = kvgrpc("health", "-s", handoff.decode_address)
    assert health.code == 0 and "NOT_SERVING" not in health.out


def test_health_of_one_service_is_a_probe(kvgrpc: Callable[..., Ended], handoff: Handoff) -> None:
    assert kvgrpc("health", "kvgrpc.v1.TransferService", "-s", handoff.decode_address).code == 0
    assert kvgrpc("health", "kvgrpc.v1.Nonsense", "-s", handoff.decode_address).code == 64 + 5


@pytest.mark.parametrize(
    ("arguments", "code", "reason", "next_step"),
    [
        (["room", "4711"], 64 + 5, "ROOM_NOT_FOUND", "kvgrpc rooms"),
        (["ranks", "nobody"], 64 + 5, "ENGINE_NOT_FOUND", "kvgrpc engines"),
        (["events", "replay", "--from", "99"], 64 + 11, "EVENTS_SEQUENCE_IN_FUTURE", "kvgrpc streams"),
        (["events", "replay", "--log", "0" * 32], 64 + 10, "STALE_LOG", "--log"),
    ],
)
def test_a_refusal_says_what_to_do_next(
    kvgrpc: Callable[..., Ended], handoff: Handoff, arguments: list[str], code: int, reason: str, next_step: str
) -> None:
    ended = kvgrpc(*arguments, "-s", handoff.prefill_address)
    assert ended.code == code
    assert ended.err.startswith(f"{reason}: ") and next_step in ended.err
    assert ended.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("replay", "--from", str(2**64)),
        ("replay", "--to", str(2**64)),
        ("tail", "--dp", str(2**32)),
        ("follow", "--dp", str(2**32)),
        ("stats", "--dp", "-1"),
    ],
    ids=str,
)
def test_a_number_that_no_message_holds_is_wrong_usage(
    kvgrpc: Callable[..., Ended], handoff: Handoff, arguments: tuple[str, ...]
) -> None:
    ended = kvgrpc("events", *arguments, "-s", handoff.prefill_address)
    assert (ended.code, ended.out) == (2, "") and arguments[1] in ended.err


def test_a_wrong_field_is_told_once(kvgrpc: Callable[..., Ended], handoff: Handoff) -> None:
    ended = kvgrpc("events", "replay", "--from", "1", "--to", "0", "-s", handoff.prefill_address)
    assert ended.code == 64 + 3
    assert ended.err.splitlines() == ["INVALID_REQUEST: end_sequence: must be at least from_sequence = 1, not 0"]


def test_a_title_is_one_line_though_its_table_is_narrow(kvgrpc: Callable[..., Ended], handoff: Handoff) -> None:
    out = kvgrpc("events", "stats", "-s", handoff.prefill_address).out
    assert "dropped" in out.splitlines()[0]


def test_nobody_there_is_said_within_the_timeout(kvgrpc: Callable[..., Ended]) -> None:
    began = time.monotonic()
    ended = kvgrpc("engines", "-s", "127.0.0.1:1", "--timeout", "0.3")
    assert ended.code == 64 + 14
    assert ended.err.startswith("PEER_UNREACHABLE") and "kvgrpc serve registry" in ended.err
    assert time.monotonic() - began < 20.0


@pytest.mark.parametrize(("asked", "where"), [(["rooms"], "kvgrpc ranks"), (["events", "tail"], "kvgrpc ranks")])
def test_who_asks_a_rank_is_not_told_to_start_a_registry(
    kvgrpc: Callable[..., Ended], asked: list[str], where: str
) -> None:
    ended = kvgrpc(*asked, "-s", "127.0.0.1:1", "--timeout", "0.3")
    assert "Is it running?" in ended.err and where in ended.err and "serve registry" not in ended.err


class TestAPortThatSpeaksSomethingElse:
    """What is said of a port that answers, but not to us."""

    @pytest.fixture
    def says(self, kvgrpc: Callable[..., Ended]) -> Callable[..., str]:
        def ask(address: str, *options: str) -> str:
            ended = kvgrpc("engines", "-s", address, "--timeout", "0.5", *options)
            assert ended.code == 64 + 14
            assert ended.err.startswith("PEER_UNREACHABLE") and "Is it running?" not in ended.err
            return ended.err.splitlines()[-1]

        return ask

    @pytest.mark.skipif(OPENSSL is None, reason="the certificates are made by openssl")
    @pytest.mark.parametrize("mutual", [False, True])
    def test_tls(self, says: Callable[..., str], tmp_path: Path, mutual: bool) -> None:
        authority, other = Authority(tmp_path), Authority(tmp_path, "other")
        own = authority.sign("server", "IP:127.0.0.1")
        client_ca = authority.ca_file if mutual else ""
        registry = RegistryServer(
            ["127.0.0.1:0"], ServerSecurity(own.cert_file, own.key_file, client_ca_file=client_ca)
        ).open()
        try:
            assert "speaks TLS: give --ca-file" in says(registry.address)
            untrusted = says(registry.address, "--ca-file", other.ca_file)
            assert [word for word in ("does --ca-file sign", "--server-name") if word not in untrusted] == []
        finally:
            registry.close()

    @pytest.mark.skipif(OPENSSL is None, reason="the certificates are made by openssl")
    def test_plaintext(self, says: Callable[..., str], handoff: Handoff, tmp_path: Path) -> None:
        assert "leave out --ca-file" in says(handoff.prefill_address, "--ca-file", Authority(tmp_path).ca_file)

    def test_http_1(self, says: Callable[..., str]) -> None:
        with http.server.HTTPServer(("127.0.0.1", 0), AnswersNothing) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                assert "does not speak gRPC" in says(f"127.0.0.1:{server.server_port}")
            finally:
                server.shutdown()
                thread.join()

    def test_nothing_at_all(self, says: Callable[..., str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as hangs:
            assert "says nothing" in says(f"127.0.0.1:{hangs.getsockname()[1]}")

    def test_a_unix_socket_is_looked_at_too(self, says: Callable[..., str], tmp_path: Path) -> None:
        path = str(tmp_path / "s")
        with socket.socket(socket.AF_UNIX) as hangs:
            hangs.bind(path)
            hangs.listen()
            assert "says nothing" in says(f"unix:{path}")


class AnswersNothing(http.server.BaseHTTPRequestHandler):
    """An HTTP server that logs nothing."""

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def test_wrong_usage_is_exit_code_2(kvgrpc: Callable[..., Ended]) -> None:
    for arguments in (["bogus"], ["room", "0"], ["room", str(2**63)], ["rooms", "--state", "lost"]):
        assert kvgrpc(*arguments).code == 2


def test_a_registry_with_tokens_lets_each_role_do_its_own(kvgrpc: Callable[..., Ended], tmp_path: Path) -> None:
    security = ServerSecurity(tokens=tokens_of("operator:o\nconsumer:c"))
    registry = RegistryServer(["127.0.0.1:0"], security).open()
    operator, consumer = tmp_path / "operator", tmp_path / "consumer"
    operator.write_text(f"{secret('o')}\n")
    consumer.write_text(f"{secret('c')}\n")
    try:
        assert kvgrpc("engines", "-s", registry.address).err.startswith("CREDENTIALS_INVALID")
        assert kvgrpc("engines", "-s", registry.address, "--token-file", str(consumer)).code == 0
        refused = kvgrpc("drain", "-s", registry.address, "--token-file", str(consumer))
        assert refused.code == 64 + 7 and refused.err.startswith("PERMISSION_DENIED")
        assert kvgrpc("drain", "-s", registry.address, "--token-file", str(operator)).code == 0
        assert kvgrpc("health", "-s", registry.address, "--token-file", str(operator)).code == 1
        for word in ("undrain", "health"):
            assert kvgrpc(word, "-s", registry.address, "--token-file", str(operator)).code == 0
        nobody = kvgrpc("callers", "-s", registry.address, "--token-file", str(operator))
        assert nobody.code == 0 and "nobody has anything open" in nobody.out
    finally:
        registry.close()


def test_callers_are_told_with_what_they_have_open(kvgrpc: Callable[..., Ended], handoff: Handoff) -> None:
    ended = kvgrpc("callers", "-s", handoff.prefill_address)
    assert ended.code == 0 and "127.0.0.1" in ended.out
    (caller,) = kvgrpc("callers", "-s", handoff.prefill_address, "--json").lines
    assert (caller["name"], caller["rows"]) == ("127.0.0.1", 2)
    methods = {each["method"].rpartition("/")[2]: each["open"] for each in caller["methods"]}
    assert (methods["Session"], methods["KeepAlive"]) == (1, 2)


def test_settings_come_from_the_environment_too(
    kvgrpc: Callable[..., Ended], handoff: Handoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGRPC_SERVER", handoff.prefill_address)
    assert "READY" in kvgrpc("engines").out


def test_a_plaintext_registry_on_another_address_needs_insecure(kvgrpc: Callable[..., Ended]) -> None:
    ended = kvgrpc("serve", "registry", "--listen", "0.0.0.0:0")
    assert ended.code == 2
    assert ended.err.startswith("ADDRESS_NOT_ALLOWED") and "--insecure" in ended.err


def test_doctor_finds_what_every_process_needs(kvgrpc: Callable[..., Ended]) -> None:
    ended = kvgrpc("doctor", "--json")
    assert ended.code == 0
    states = {line["what"]: line["state"] for line in ended.lines}
    assert states["grpcio"] == states["protobuf"] == states["data plane shm"] == "ok"
    assert states["Mooncake's ports"] == "note"
    assert ended.err == ""


@pytest.mark.parametrize(
    ("mooncake", "remark", "heard"),
    [
        ("raise ImportError('no libibverbs')", "no libibverbs", ""),
        ("import os; os.write(2, b'glog says why'); os.abort()", "exit code -6", "glog says why"),
    ],
)
def test_doctor_survives_a_mooncake_that_does_not_open_and_shows_what_it_said(
    kvgrpc: Callable[..., Ended],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mooncake: str,
    remark: str,
    heard: str,
) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").write_text(mooncake)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = kvgrpc("doctor", "--json")
    (found,) = [line for line in ended.lines if line["what"] == "data plane mooncake"]
    assert (found["state"], ended.code) == ("note", 0) and remark in found["remark"]
    assert ended.err == heard


def test_doctor_says_what_works_with_the_engine_that_is_installed(
    kvgrpc: Callable[..., Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody tried, of which the KV events alone are as they should be, and which talks while it is loaded."""
    (tmp_path / "sglang-0.9.0.dist-info").mkdir()
    (tmp_path / "sglang-0.9.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.9.0\n")
    (tmp_path / "sglang/srt/disaggregation").mkdir(parents=True)
    (tmp_path / "sglang/__init__.py").write_text("print('welcome')")
    (tmp_path / "sglang/srt/disaggregation/kv_events.py").write_text(
        "class EventPublisherFactory:\n    def register_publisher(name, made): ...\n"
        "class EventPublisher:\n    def publish(self, events): ...\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = kvgrpc("doctor", "--json", "--engine", "sglang")
    found = {line["what"]: line for line in ended.lines}
    assert ended.code == 1
    assert found["sglang"]["state"] == "note" and "0.9.0, which kvgrpc was never run with" in found["sglang"]["remark"]
    assert found["SGLang KV events"]["state"] == "note"
    assert found["SGLang KV events"]["remark"].startswith("present, never run with this version: ")
    assert found["SGLang hand-offs"]["state"] == "missing"
    remark = found["SGLang hand-offs"]["remark"]
    assert "it has no sglang.srt.disaggregation.utils.get_kv_class; and " in remark and remark.endswith(" more")


@pytest.mark.parametrize(
    ("engine", "remark"),
    [
        ("import os; os._exit(0)", "ended the process that loaded it (exit code 0)"),
        ("import atexit; atexit.register(print, 'bye')", "1.0"),
    ],
)
def test_doctor_survives_an_engine_that_ends_it_in_order_or_has_the_last_word(
    engine: str, remark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvgrpc: Callable[..., Ended]
) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text(engine)
    (tmp_path / "sglang-1.0.dist-info").mkdir()
    (tmp_path / "sglang-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ended = kvgrpc("doctor", "--json", "--engine", "sglang")
    found = [json.loads(line) for line in ended.out.splitlines()]
    assert [each for each in found if each["what"] == "sglang" and remark in each["remark"]], found


def test_doctor_says_where_an_engine_comes_from(kvgrpc: Callable[..., Ended]) -> None:
    ended = kvgrpc("doctor", "--json", "--engine", "vllm")
    assert ended.code == 1
    assert ended.lines[-1] == {
        "what": "vllm",
        "state": "missing",
        "remark": "not installed here: pip install vllm==0.33.0",
    }


@pytest.mark.parametrize("line", documented_commands())
def test_every_command_in_the_documents_exists_with_its_options(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    found: click.Command = command
    while isinstance(found, click.Group):
        child = found.get_command(click.Context(found), words.pop(0))
        assert child is not None
        found = child
    _, superfluous, _ = found.make_parser(click.Context(found)).parse_args(words)
    assert superfluous == []
