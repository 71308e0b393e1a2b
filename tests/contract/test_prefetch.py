"""PrefetchService against a real rank with real files: pages leave, come back with the same bytes, and everything is
told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.cli.main import main
from kvgrpc.client import SyncClient
from kvgrpc.v1 import prefetch_service_pb2 as pb
from tests.contract.cache_serving import CacheRank, hashes_of, open_cache_rank, prompt


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheRank]:
    opened = open_cache_rank(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def client(cache: CacheRank) -> Iterator[SyncClient]:
    with SyncClient(cache.address) as opened:
        yield opened


def ended(client: SyncClient, operation: pb.CacheOperation) -> pb.CacheOperation:
    """The operation in its last state."""
    for message in client.watch_operations([operation.operation_id]):
        for each in message.operations:
            operation = each
    assert operation.quiescent
    return operation


class TestPrefetch:
    def test_pages_that_were_backed_up_and_evicted_come_back_with_the_same_bytes(
        self, cache: CacheRank, client: SyncClient
    ) -> None:
        tokens = prompt(20)
        hashes = hashes_of(tokens)
        cache.fill(hashes)
        pages = pb.PromptPages(tokens=tokens)
        backup = ended(client, client.start_backup(pages))
        assert backup.state == pb.OPERATION_STATE_DONE and backup.completed_pages == 20
        assert cache.evict() == 20
        assert client.lookup(pages).host_pages == 0 and client.lookup(pages).storage_pages == 20
        prefetch = ended(client, client.start_prefetch(pages))
        assert prefetch.state == pb.OPERATION_STATE_DONE
        assert list(prefetch.page_outcomes) == [pb.PAGE_OUTCOME_OK] * 20
        assert client.lookup(pages).host_pages == 20
        cache.assert_bytes(hashes)


class TestCommands:
    def test_prefetch_start_brings_the_pages_and_says_so(
        self, cache: CacheRank, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tokens = prompt(6)
        cache.store(hashes_of(tokens))
        with pytest.raises(SystemExit) as exit:
            main(["prefetch", "start", "-s", cache.address, "--tokens", ",".join(map(str, tokens)), "--json"])
        assert exit.value.code == 0 or exit.value.code is None
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (last["state"], last["completedPages"]) == ("OPERATION_STATE_DONE", 6)
        cache.assert_bytes(hashes_of(tokens))
