"""What an operator sees with the real grpcurl, without knowing Python. Built with Go where it is at hand."""

from __future__ import annotations

import base64
import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_health.v1 import health_pb2

from kvgrpc.client import SyncClient
from kvgrpc.errors import EngineNotFound
from kvgrpc.server import IndexServer
from kvgrpc.v1.index_service_pb2 import INDEX_SOURCE_STATE_CURRENT
from kvgrpc.v1.registry_service_pb2 import RankRow, RegisterRequest
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.support.cache_serving import CacheRank, hashes_of, open_cache_rank, prompt
from tests.support.rank_host import RankProcess
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
VERSION = "v1.9.4"
ROOM = 2**63 - 1
PROTOS = sorted(path.stem for path in (ROOT / "kvgrpc/v1").glob("*_pb2.py"))
BATCHES = [b"\x93\x01\x90\x00", b"\x93\x02\x90\x00"]  # msgpack: [time, no events, rank]
pytestmark = pytest.mark.timeout(400)  # building grpcurl takes a minute, once


@pytest.fixture(scope="session")
def grpcurl() -> Path:
    folder = ROOT / ".cache" / f"grpcurl-{VERSION}"
    built = folder / "grpcurl"
    if built.exists():
        return built
    go = shutil.which("go")
    if go is None:
        pytest.skip("grpcurl is built with Go, and there is no Go here")
    package = f"github.com/fullstorydev/grpcurl/cmd/grpcurl@{VERSION}"
    done = subprocess.run(
        [go, "install", package],
        env={**os.environ, "GOBIN": str(folder)},
        capture_output=True,
        text=True,
        timeout=360,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        pytest.skip(f"grpcurl could not be built: {done.stderr.strip().splitlines()[-1:]}")
    return built


@dataclass(frozen=True)
class Running:
    """A registry, a prefill and a decode in processes of their own; ROOM is half done."""

    registry: str
    prefill: str
    decode: str


@pytest.fixture(scope="module")
def running(grpcurl: Path) -> Iterator[Running]:
    registry = subprocess.Popen(
        [sys.executable, "-m", "kvgrpc", "serve", "registry", "--listen", "127.0.0.1:0", "--lease-ttl", "3"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    ranks: list[RankProcess] = []
    try:
        assert registry.stdout is not None
        address = registry.stdout.readline().split()[-1]
        ranks += [
            RankProcess("P", "PREFILL", registry=address, events={"publisher": "null"}),
            RankProcess("D", "DECODE", registry=address),
        ]
        prefill, decode = (rank.opened() for rank in ranks)
        decode.call("receive", ROOM, address, list(range(8)))
        prefill.call("send", ROOM, list(range(7)), last=False)
        decode.call("wait", "receivers", [ROOM], [3])
        prefill.call("publish", BATCHES)
        with SyncClient(address, timeout=20.0) as client, pytest.raises(EngineNotFound):
            client.get_engine("nobody")  # asks again until the registry is no longer warming up
        yield Running(address, prefill.address, decode.address)
        registry.send_signal(signal.SIGTERM)
        assert registry.wait(10) == 0
    finally:
        for rank in ranks:
            rank.end()
        registry.kill()


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def ask(grpcurl: Path) -> Any:
    def run(server: str, *words: str, data: object = None) -> Answer:
        arguments = ["-plaintext", "-max-time", "10", "-format-error"]
        if data is not None:
            arguments += ["-d", json.dumps(data)]
        done = subprocess.run(
            [grpcurl, *arguments, server, *words], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return run


def test_list_shows_the_services_of_every_process(ask: Any, running: Running) -> None:
    common = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "kvgrpc.v1.ServerService"}
    rank = {"kvgrpc.v1.TransferService", "kvgrpc.v1.EventService"}
    assert set(ask(running.registry, "list").out.split()) == common | {"kvgrpc.v1.RegistryService"}
    assert set(ask(running.prefill, "list").out.split()) == common | rank
    assert set(ask(running.decode, "list").out.split()) == common | rank


def test_describe_shows_a_service_and_a_message(ask: Any, running: Running) -> None:
    service = ask(running.decode, "describe", "kvgrpc.v1.TransferService").out
    assert "rpc ListRooms ( .kvgrpc.v1.ListRoomsRequest ) returns ( .kvgrpc.v1.ListRoomsResponse )" in service
    assert "uint64 room = 1" in ask(running.decode, "describe", "kvgrpc.v1.GetRoomRequest").out


def test_engines_are_ready_and_their_rows_say_where_they_listen(ask: Any, running: Running) -> None:
    found = ask(running.registry, "kvgrpc.v1.RegistryService/ListEngines", data={"includeRows": True}).json
    assert {engine["name"]: engine["ready"] for engine in found["engines"]} == {"D": True, "P": True}
    listens = {row["rank"]["rank"]["engine"]: row["endpoints"]["grpc"] for e in found["engines"] for row in e["rows"]}
    assert listens == {"P": running.prefill, "D": running.decode}


def test_a_room_is_seen_from_both_sides(ask: Any, running: Running) -> None:
    for server, role in ((running.prefill, "ROLE_PREFILL"), (running.decode, "ROLE_DECODE")):
        (room,) = ask(server, "kvgrpc.v1.TransferService/ListRooms").json["rooms"]
        assert (room["room"], room["state"], room["role"]) == (str(ROOM), "ROOM_STATE_TRANSFERRING", role)
        assert room["parts"][0]["pagesDone"] == 7
        (session,) = ask(server, "kvgrpc.v1.TransferService/ListSessions").json["sessions"]
        assert session["state"] == "SESSION_STATE_OPEN"
    sought = {"rooms": [{"room": str(ROOM)}]}
    assert ask(running.prefill, "kvgrpc.v1.TransferService/LocateRooms", data=sought).json == sought


def test_events_are_replayed_with_their_exact_bytes(ask: Any, running: Running) -> None:
    (stream,) = ask(running.prefill, "kvgrpc.v1.EventService/ListStreams").json["streams"]
    assert (stream["engine"], stream["nextSequence"]) == ("P", "3")
    watched = ask(running.prefill, "kvgrpc.v1.EventService/Watch", data={"mode": "WATCH_MODE_REPLAY"}).out
    parts = read_all(watched)
    payloads = [base64.b64decode(payload) for part in parts[1:] for payload in part["raw"]["payloads"]]
    assert b"AllBlocksCleared" in payloads[0], "how a log begins"
    assert payloads[1:] == BATCHES
    assert ask(running.decode, "kvgrpc.v1.EventService/ListStreams").json == {}


def test_health_and_info_need_no_proto_at_hand(ask: Any, running: Running) -> None:
    assert ask(running.decode, "grpc.health.v1.Health/Check").json == {"status": "SERVING"}
    info = ask(running.decode, "kvgrpc.v1.ServerService/GetServerInfo").json
    assert (info["rank"]["rank"]["engine"], info["role"]) == ("D", "ROLE_DECODE")


@pytest.mark.parametrize(
    ("where", "method", "data", "code", "reason"),
    [
        ("decode", "TransferService/GetRoom", {"room": "4711"}, 5, "ROOM_NOT_FOUND"),
        ("decode", "TransferService/ListRooms", {"pageToken": "nonsense"}, 3, "INVALID_REQUEST"),
        ("registry", "RegistryService/GetEngine", {"engine": "nobody"}, 5, "ENGINE_NOT_FOUND"),
        ("registry", "RegistryService/Register", {"rows": []}, 3, "INVALID_REQUEST"),
        ("prefill", "EventService/Watch", {}, 3, "INVALID_REQUEST"),
        ("prefill", "EventService/Watch", {"mode": 1, "fromSequence": "99"}, 11, "EVENTS_SEQUENCE_IN_FUTURE"),
        ("prefill", "EventService/Watch", {"mode": 1, "engine": "nobody"}, 5, "STREAM_NOT_FOUND"),
    ],
)
def test_nonsense_gets_a_typed_error(
    ask: Any, running: Running, where: str, method: str, data: object, code: int, reason: str
) -> None:
    refused = ask(getattr(running, where), f"kvgrpc.v1.{method}", data=data)
    assert refused.code == 64 + code
    (info,) = [
        detail for detail in json.loads(refused.err)["details"] if detail["@type"].endswith("google.rpc.ErrorInfo")
    ]
    assert (info["reason"], info["domain"]) == (f"ERROR_REASON_{reason}", "kvgrpc.dev")


OPERATIONS = (ROOT / "docs/watch/grpcurl.md").read_text()
QUESTIONS = OPERATIONS.split("<!-- questions -->")[1].split("<!-- end of questions -->")[0]
LINES = {row.split("|")[1].strip(): row.split("`")[-2] for row in QUESTIONS.splitlines() if "grpcurl" in row}


@pytest.fixture(scope="module")
def index(running: Running) -> Iterator[str]:
    server = IndexServer(["127.0.0.1:0"], registry=running.registry).open()
    with SyncClient(server.address) as client:
        wait_until(lambda: [source.freshness.state for source in client.list_sources()] == [INDEX_SOURCE_STATE_CURRENT])
    yield server.address
    server.close()


@pytest.fixture(scope="module")
def protoset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The descriptors, for servers whose reflection may not be used."""
    held = FileDescriptorSet()
    pending = [importlib.import_module(f"kvgrpc.v1.{module}").DESCRIPTOR for module in PROTOS]
    pending.append(health_pb2.DESCRIPTOR)
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name not in added:
            added.add(file.name)
            for dependency in file.dependencies:
                add(dependency)
            file.CopyToProto(held.file.add())

    for file in pending:
        add(file)
    path = tmp_path_factory.mktemp("protoset") / "kvgrpc.protoset"
    path.write_bytes(held.SerializeToString())
    return path


@pytest.fixture
def typed(grpcurl: Path, running: Running, index: str) -> Any:
    """What a line of docs/watch/grpcurl.md prints, with the addresses of here."""

    def run(question: str, *options: str, engine: str = "P") -> Any:
        (line,) = [line for name, line in LINES.items() if name.startswith(question)]
        for name, address in (("REGISTRY", running.registry), ("RANK", running.prefill), ("INDEX", index)):
            line = line.replace(f" {name} ", f" {address} ")
        line = line.replace('"P"', f'"{engine}"')
        words = [str(grpcurl), *options, "-max-time", "10", *shlex.split(line)[1:]]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("question", LINES)
def test_each_question_has_a_line_that_answers_with_and_without_reflection(
    typed: Any, protoset: Path, question: str
) -> None:
    assert isinstance(typed(question), dict)
    assert isinstance(typed(question, "-protoset", str(protoset)), dict)


def test_what_operators_and_routers_ask_is_one_line(typed: Any, running: Running) -> None:
    assert "sources" not in typed("which caches are stale")
    with SyncClient(running.registry) as client:
        (row,) = client.get_engine("P").rows
    half = RankRow()
    half.CopyFrom(row)
    half.rank.rank.engine, half.layout.tp = "Q", 3
    with grpc.insecure_channel(running.registry) as channel:
        RegistryServiceStub(channel).Register(RegisterRequest(rows=[half]), timeout=10)
        missing = typed("which ranks keep", engine="Q")["engine"]["missingRanks"]
    assert [rank["tp"] for rank in missing] == [1, 2]
    assert "missingRanks" not in typed("which ranks keep")["engine"]
    assert [room["room"] for room in typed("which rooms are open")["rooms"]] == [str(ROOM)]


def test_the_newest_failed_rooms_come_first(ask: Any, grpcurl: Path) -> None:
    prefill = RankProcess("F", "PREFILL")
    try:
        address = prefill.opened().address
        for room in (9, 3, 7):
            prefill.call("send", room, [0], last=False)
            with SyncClient(address) as client:
                client.cancel_room(room)
        listed = ask(address, "kvgrpc.v1.TransferService/ListRooms", data={"newestFailed": True, "pageSize": 2}).json
        assert [(room["room"], room["failure"]["reason"]) for room in listed["rooms"]] == [
            ("7", "ERROR_REASON_ROOM_CANCELLED"),
            ("3", "ERROR_REASON_ROOM_CANCELLED"),
        ], "not by number"
        assert listed["total"] == 3
        refused = ask(address, "kvgrpc.v1.TransferService/ListRooms", data={"newestFailed": True, "heldOnly": True})
        assert refused.code == 64 + 3 and "held_only" in refused.err
    finally:
        prefill.end()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheRank]:
    opened = open_cache_rank(tmp_path)
    yield opened
    opened.close()


class TestTheCache:
    def test_a_prompt_goes_to_storage_and_back_and_is_watched(self, ask: Any, cache: CacheRank) -> None:
        def call(method: str, **data: object) -> Any:
            return ask(cache.address, f"kvgrpc.v1.PrefetchService/{method}", data=data)

        def ended(operation_id: str) -> Any:
            messages = read_all(call("WatchOperations", operationIds=[operation_id]).out)
            (last,) = [each for message in messages for each in message.get("operations", ()) if each.get("quiescent")]
            return last

        tokens = {"tokens": prompt(6, 1)}
        hashes = hashes_of(prompt(6, 1))
        cache.fill(hashes)
        backup = call("StartBackup", pages=tokens, requestId="b").json["operation"]
        done = ended(backup["operationId"])
        assert (done["state"], done["completedPages"]) == ("OPERATION_STATE_DONE", 6)
        assert (
            call("StartBackup", pages=tokens, requestId="b").json["operation"]["operationId"] == backup["operationId"]
        )
        assert cache.evict() == 6
        assert call("Lookup", pages=tokens).json == {"askedPages": 6, "storagePages": 6, "pageTokens": 4}
        by_hash = {"pageHashes": [base64.b64encode(bytes.fromhex(each)).decode() for each in hashes]}
        done = ended(call("StartPrefetch", pages=by_hash).json["operation"]["operationId"])
        assert (done["state"], done["pageOutcomes"]) == ("OPERATION_STATE_DONE", ["PAGE_OUTCOME_OK"] * 6)
        cache.assert_bytes(hashes)
        info = call("GetCacheInfo").json
        used = {tier["tier"]: int(tier["usedPages"]) for tier in info["tiers"]}
        assert used == {"TIER_HOST": 6, "TIER_STORAGE": 6}
        assert (info["storageBackend"], info["storageHealthy"]) == ("file", True)

    def test_a_page_hash_of_a_wrong_length_is_named(self, ask: Any, cache: CacheRank) -> None:
        pages = {"pageHashes": [base64.b64encode(bytes(length)).decode() for length in (32, 31)]}
        refused = ask(cache.address, "kvgrpc.v1.PrefetchService/StartPrefetch", data={"pages": pages})
        assert refused.code == 64 + 3
        (info,) = [
            each for each in json.loads(refused.err)["details"] if each["@type"].endswith("google.rpc.ErrorInfo")
        ]
        assert (info["reason"], info["metadata"]["field"]) == (
            "ERROR_REASON_INVALID_REQUEST",
            "pages.page_hashes[1]",
        )


def read_all(text: str) -> list[Any]:
    """grpcurl prints the messages of a stream one after the other, each over many lines."""
    decoder, found, position = json.JSONDecoder(), [], 0
    while position < len(text):
        message, position = decoder.raw_decode(text, position)
        found.append(message)
        position += len(text[position:]) - len(text[position:].lstrip())
    return found
