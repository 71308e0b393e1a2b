"""``kvgrpc events follow | score | sources`` and ``kvgrpc serve index`` against a rank and its registry."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.cli.main import main
from kvgrpc.client import SyncClient
from kvgrpc.client.following.sync_follower import SyncEventFollower
from kvgrpc.errors import InvalidRequest
from kvgrpc.events import BlockStored, JournalingPublisher, KVEventBatch
from kvgrpc.events.following.messages import FollowerCounts
from kvgrpc.hashing import page_hashes, sglang_event_hash
from kvgrpc.server import IndexServer
from kvgrpc.v1.index_service_pb2 import IndexSource
from tests.support.rank_host import RankHost
from tests.support.scoring import question
from tests.support.waiting import wait_until

TOKENS = list(range(64))


@pytest.fixture(scope="module")
def rank() -> Iterator[RankHost]:
    events = {"publisher": "null"}
    settings = {"registry": "embedded", "events": events, "lease_ttl": 1.0, "labels": ("zone=a", "rack=7")}
    host = RankHost("P", "PREFILL", settings)
    hashes = [sglang_event_hash(page) for page in page_hashes(TOKENS, 16)]
    host.rank.events.publish(KVEventBatch(time.time(), [BlockStored(hashes[:3], None, [], 16, medium="GPU")]))
    host.rank.events.publish(KVEventBatch(time.time(), [BlockStored(hashes[3:], hashes[2], [], 16, medium="CPU")]))
    yield host
    host.close(2.0)


def held_in(source: IndexSource, medium: str) -> int:
    return sum(held.blocks for held in source.blocks if held.medium == medium)


@pytest.fixture(scope="module")
def index(rank: RankHost) -> Iterator[IndexServer]:
    server = IndexServer(["127.0.0.1:0"], registry=rank.rank.address).open()
    with SyncClient(server.address) as client:
        wait_until(lambda: [held_in(source, "CPU") for source in client.list_sources()] == [1])
    yield server
    server.close()


@pytest.fixture
def kvgrpc(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_follow_says_what_a_cache_holds(rank: RankHost, kvgrpc: Any) -> None:
    code, out, _ = kvgrpc("events", "follow", "--once", "-s", rank.rank.address)
    assert code == 0
    assert re.match(r"current +log [0-9a-f]{8} next 3 lag 0: 1 in CPU, 3 in GPU \(1 snapshots", out)
    code, out, _ = kvgrpc("events", "follow", "--once", "--json", "-s", rank.rank.address)
    told = json.loads(out)
    assert (told["state"], told["blocks"], told["nextSequence"]) == ("current", {"CPU": 1, "GPU": 3}, "3")
    assert (told["engine"], told["dp"]) == ("P", 0)
    assert not [key for key in told if "_" in key], "names as in the JSON of messages"


def test_snapshot_shows_what_a_cache_holds_and_ends(rank: RankHost, kvgrpc: Any) -> None:
    code, out, _ = kvgrpc("events", "snapshot", "--json", "-s", rank.rank.address)
    stored = [event for line in out.splitlines() for event in json.loads(line)["events"]]
    assert (
        code == 0 and sum(len(event[1] if isinstance(event, list) else event["block_hashes"]) for event in stored) == 4
    )
    code, out, _ = kvgrpc("events", "snapshot", "-s", rank.rank.address)
    assert code == 0 and "BlockStored 3:" in out


def test_verify_compares_with_the_publishers_digest(rank: RankHost, kvgrpc: Any) -> None:
    code, out, _ = kvgrpc("events", "verify", "-s", rank.rank.address)
    assert code == 0 and out.startswith("equal: 1 in CPU, 3 in GPU")
    code, out, _ = kvgrpc("events", "verify", "--json", "-s", rank.rank.address)
    told = json.loads(out)
    assert code == 0 and (told["equal"], told["engine"], told["dp"]) == (True, "P", 0)
    assert (told["blocks"], told["nextSequence"]) == ({"CPU": 1, "GPU": 3}, "3")


def test_verify_says_where_no_digest_comes(rank: RankHost, kvgrpc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyncEventFollower, "counts", FollowerCounts())
    code, out, _ = kvgrpc("events", "verify", "--within", "1", "-s", rank.rank.address)
    assert code == 1 and "no digest came" in out
    monkeypatch.setattr(SyncEventFollower, "counts", FollowerCounts(digests_different=1))
    code, out, _ = kvgrpc("events", "verify", "-s", rank.rank.address)
    assert code == 1 and out.startswith("DIFFERENT")


@pytest.mark.parametrize("command", [("follow", "--once"), ("verify",)], ids=lambda command: command[0])
def test_an_answer_that_is_known_is_said_though_the_publisher_goes(
    command: tuple[str, ...], kvgrpc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = RankHost("gone", "PREFILL", {"registry": "embedded", "events": {"publisher": "null"}})
    publisher = host.rank.events
    assert isinstance(publisher, JournalingPublisher)
    publisher.publish(KVEventBatch(time.time(), [BlockStored([1, 2], None, [], 16)]))
    wait_until(lambda: publisher.counts.unsent == 0)
    method = "until_current" if command[0] == "follow" else "close"
    known = getattr(SyncEventFollower, method)

    def and_then_it_goes(self: SyncEventFollower, *arguments: Any) -> None:
        known(self, *arguments)
        host.close(2.0)

    monkeypatch.setattr(SyncEventFollower, method, and_then_it_goes)
    try:
        code, out, _ = kvgrpc("events", *command, "--json", "-s", host.rank.address)
    finally:
        host.close(2.0)
    told = json.loads(out)
    assert (code, told["blocks"], told["nextSequence"]) == (0, {"GPU": 2}, "2")
    assert (told["engine"], told["dp"]) == ("gone", 0)


def test_stats_counts_what_is_kept(rank: RankHost, kvgrpc: Any) -> None:
    code, out, _ = kvgrpc("events", "stats", "--json", "-s", rank.rank.address)
    told = json.loads(out)
    assert (told["engine"], told["dp"]) == ("P", 0)
    assert code == 0 and (told["batches"], told["events"]["BlockStored"], told["blocks"]["BlockStored"]) == (3, 2, 4)
    code, out, _ = kvgrpc("events", "stats", "-s", rank.rank.address)
    assert code == 0 and "BlockStored" in out and "3 batches" in out


def test_an_index_finds_the_caches_at_a_registry(rank: RankHost, index: IndexServer, kvgrpc: Any) -> None:
    code, out, _ = kvgrpc("events", "sources", "--json", "-s", index.address)
    source = json.loads(out)
    assert (code, source["engine"], source["address"]) == (0, "P", rank.rank.address)
    host = {"tier": "TIER_HOST", "medium": "CPU", "blocks": "1"}
    device = {"tier": "TIER_DEVICE", "medium": "GPU", "blocks": "3"}
    assert (source["blocks"], source["pageTokens"]) == ([host, device], 16)
    code, out, _ = kvgrpc("events", "sources", "-s", index.address)
    assert code == 0 and "CPU 1, GPU 3" in out and "current" in out
    code, out, _ = kvgrpc("events", "sources", "--wide", "-s", index.address)
    assert code == 0 and "rack=7, zone=a" in out


def test_score_says_who_holds_a_prompt(index: IndexServer, kvgrpc: Any, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([*TOKENS, 7, 7]))
    asked = ("events", "score", "--tokens", str(prompt), "--page-tokens", "16", "-s", index.address)
    code, out, _ = kvgrpc(*asked, "--json")
    (answer,) = json.loads(out)["prompts"]
    assert (code, answer["blocks"]) == (0, 4)
    score = answer["scores"][0]
    assert (score["engine"], score["deviceBlocks"], score["hostBlocks"], score["blocks"]) == ("P", 3, 4, 4)
    code, out, _ = kvgrpc(*asked)
    assert code == 0 and "4 blocks" in out and "current" in out
    first = sglang_event_hash(page_hashes(TOKENS, 16)[0])
    code, out, _ = kvgrpc("events", "score", f"--hash={first}", "--engine", "Q", "-s", index.address)
    assert code == 0 and "no cache holds the first" in out


def test_score_asks_the_caches_of_ranks_with_labels(index: IndexServer, kvgrpc: Any) -> None:
    first = sglang_event_hash(page_hashes(TOKENS, 16)[0])
    asked = ("events", "score", f"--hash={first}", "-s", index.address)
    for labels, holders in ((("--label=zone=a", "--label=rack=7"), 1), (("--label=zone=b",), 0)):
        code, out, _ = kvgrpc(*asked, *labels, "--json")
        assert (code, len(json.loads(out)["prompts"][0].get("scores", []))) == (0, holders)
    code, _, err = kvgrpc(*asked, "--label=zone")
    assert code == 2 and "--label" in err and "NAME=VALUE" in err


def test_what_score_cannot_read_is_said(index: IndexServer, kvgrpc: Any, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text("[-1]")
    code, _, err = kvgrpc("events", "score", "--tokens", str(prompt), "-s", index.address)
    assert code == 2 and "no array of integers" in err
    code, _, err = kvgrpc("events", "score", "--hash", "x", "-s", index.address)
    assert code == 2 and "'x' is no integer" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "by --hash or by --tokens"),
        (("--hash", "1", "--tokens", "PROMPT"), "by --hash or by --tokens"),
        (("--hash", str(2**64)), "more than 64 bits"),
        (("--hash", str(-(2**63) - 1)), "more than 64 bits"),
        (("--tokens", "PROMPT", "--page-tokens", str(2**32)), "--page-tokens"),
    ],
    ids=str,
)
def test_a_question_that_cannot_be_meant_is_wrong_usage(
    arguments: tuple[str, ...], says: str, index: IndexServer, kvgrpc: Any, tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("[1, 2]")
    asked = [str(tmp_path / "prompt") if argument == "PROMPT" else argument for argument in arguments]
    code, out, told = kvgrpc("events", "score", "-s", index.address, *asked)
    assert (code, out) == (2, "") and says in told


@pytest.mark.parametrize("text", ["[true]", "[" * 100_000])
def test_a_file_without_tokens_is_wrong_usage(text: str, index: IndexServer, kvgrpc: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text(text)
    code, _, told = kvgrpc("events", "score", "-s", index.address, "--tokens", str(tmp_path / "prompt"))
    assert code == 2 and "--tokens" in told


@pytest.mark.parametrize("command", [("follow", "--once"), ("verify",)], ids=lambda command: command[0])
def test_a_stream_that_is_not_there_is_said_at_once(command: tuple[str, ...], rank: RankHost, kvgrpc: Any) -> None:
    """A follower would wait for it, and tell of a rank that does not answer."""
    began = time.monotonic()
    code, _, told = kvgrpc("events", *command, "--dp", "3", "-s", rank.rank.address)
    assert code == 64 + 5 and told.startswith("STREAM_NOT_FOUND")
    assert time.monotonic() - began < 15, "not after the 30 s of a follower"


def test_an_index_of_nothing_is_refused(kvgrpc: Any) -> None:
    code, _, err = kvgrpc("serve", "index")
    assert code == 2 and "name a --registry" in err
    with pytest.raises(InvalidRequest, match="registry"):
        IndexServer(["127.0.0.1:0"])


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--registry", "nonsense"), "registry"),
        (("--registry", "10.0.0.1:8998,10.0.0.2"), "registry"),
        (("--source", "127.0.0.1:1", "--source", "127.0.0.1"), "sources[1]"),
    ],
    ids=str,
)
def test_an_index_of_what_is_no_address_does_not_start(arguments: tuple[str, ...], field: str, kvgrpc: Any) -> None:
    """It would serve, and look for it for ever."""
    code, _, err = kvgrpc("serve", "index", "--listen", "127.0.0.1:0", *arguments)
    assert code == 2 and err.startswith(f"INVALID_REQUEST: {field}: ")


def test_events_of_a_relay_that_are_nested_without_end_are_wrong(kvgrpc: Any) -> None:
    code, _, err = kvgrpc("serve", "relay", "tcp://127.0.0.1:1", "--engine", "e", "--events", "[" * 10_000)
    assert code == 2 and err.startswith("INVALID_REQUEST: events: ")


def test_serve_index_says_where_it_listens_and_ends_on_sigterm(rank: RankHost) -> None:
    command = [sys.executable, "-m", "kvgrpc", "serve", "index", "--listen", "127.0.0.1:0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGRPC_")}
    process = subprocess.Popen(
        [*command, "--registry", rank.rank.address, "--metrics-listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        status = process.stdout.readline().removeprefix("metrics at ").strip()
        address = process.stdout.readline().removeprefix("kvgrpc index listens on ").strip()
        with SyncClient(address) as client:
            wait_until(lambda: [held_in(source, "GPU") for source in client.list_sources()] == [3])
            wait_until(lambda: client.health("kvgrpc.v1.IndexService") == "SERVING")
            assert "kvgrpc.v1.IndexService" in client.get_server_info().services
            first = sglang_event_hash(page_hashes(TOKENS, 16)[0])
            for held in (first, 77):
                client.score(question(hashes=[held % 2**64]))
        assert "[+] 1 of 1 caches are current\n" in page_of(status, "/readyz")
        wanted = {
            'kvgrpc_index_sources{state="CURRENT"} 1.0',
            'kvgrpc_index_sources{state="CONNECTING"} 0.0',
            "kvgrpc_index_blocks 4.0",
            "kvgrpc_index_lag_batches 0.0",
            "kvgrpc_index_not_followed 0.0",
            "kvgrpc_index_prompts_total 2.0",
            "kvgrpc_index_prompt_misses_total 1.0",
        }
        wait_until(lambda: wanted <= set(page_of(status, "/metrics").splitlines()))  # gauges are set at each look
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def page_of(status: str, path: str) -> str:
    return str(urllib.request.urlopen(f"http://{status}{path}", timeout=10).read().decode())


def test_a_relay_names_what_it_cannot_listen_on(kvgrpc: Any) -> None:
    code, _, err = kvgrpc("serve", "relay", "tcp://127.0.0.1:1", "--engine", "e", "--listen", "nonsense")
    assert code == 2 and err.startswith("INVALID_REQUEST: listen: ")
