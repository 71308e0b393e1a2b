"""The commands of the cache, from their words to their exit code."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from kvgrpc.cli.main import main
from kvgrpc.client import SyncClient
from kvgrpc.v1 import prefetch_service_pb2 as pb
from tests.support.cache_serving import CacheRank, hashes_of, open_cache_rank, prompt
from tests.support.faults.storage import FaultyBackend, memory_backend
from tests.support.waiting import wait_until


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

    @pytest.mark.parametrize("how", ["start", "watch", "cancel"])
    def test_an_operation_that_takes_its_time_is_followed_to_its_end(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
    ) -> None:
        storage = FaultyBackend(memory_backend())
        cache = open_cache_rank(tmp_path, storage)
        tokens = prompt(6)
        cache.store(hashes_of(tokens))
        begun, may_end = threading.Event(), threading.Event()

        def slow(call: str, key: str) -> None:
            if call == "read":
                begun.set()
                assert may_end.wait(20)

        def end_it() -> None:
            """Once the command watches, or has cut the operation."""
            assert begun.wait(20)
            (operation,) = cache.manager.controller.book.open()
            wait_until(lambda: cache.manager.controller.book._listeners if how != "cancel" else operation.cut)
            may_end.set()

        storage.fault = slow
        with SyncClient(cache.address) as client:
            pages = pb.PromptPages(tokens=tokens)
            started = None if how == "start" else client.start_prefetch(pages).operation_id
            ender = threading.Thread(target=end_it)
            ender.start()
            assert how == "start" or begun.wait(20)  # one that is cut before it reads never reads
            with pytest.raises(SystemExit) as exit:
                order = ["--tokens", ",".join(map(str, tokens))] if started is None else [started]
                main(["prefetch", how, "-s", cache.address, *order])
            ender.join(20)
        words = " ".join(capsys.readouterr().out.split())
        assert not exit.value.code
        if how == "cancel":
            assert "state CANCELLED why CANCELLED" in words
        elif how == "watch":
            assert words.endswith("prefetch DONE 6/6 pages")
        else:
            assert "state DONE" in words and "completed 6" in words
        cache.close()
        assert storage.close(5.0)

    @pytest.mark.parametrize(("storage", "words"), [("file", "storage 6"), (None, "storage unknown")])
    def test_a_purge_that_only_counts_counts_storage_or_says_that_it_cannot(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], storage: str | None, words: str
    ) -> None:
        cannot = memory_backend()
        cache = open_cache_rank(tmp_path, storage or cannot)
        cache.store(hashes_of(prompt(6)))
        with pytest.raises(SystemExit) as exit:
            main(["cache", "purge", "-s", cache.address, "--tier", "storage", "--dry-run"])
        assert not exit.value.code
        assert words in " ".join(capsys.readouterr().out.split())
        cache.close()
        assert cannot.close(5.0)

    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            (["prefetch", "lookup", "--tokens", "0 1 2 3 4 5 6 7"], 0, "device, host or storage"),
            (["prefetch", "list"], 0, "Cache operations"),
            (["prefetch", "start", "--tokens", "9,9,9,9,9"], 1, "BELOW_THRESHOLD"),
            (["prefetch", "start", "--tokens", "9,9,9,9,9", "--no-wait"], 0, "pages asked"),
            (["prefetch", "backup", "--tokens", "9,9,9,9,9"], 1, "NOT_PRESENT"),
            (["prefetch", "start"], 2, ""),
            (["prefetch", "start", "--tokens", "1,x"], 2, ""),
            (["prefetch", "lookup", "--hash", "12"], 2, ""),
            (["prefetch", "cancel", "nobody"], 64 + 5, ""),
            (["cache", "info"], 0, "test/model"),
            (["cache", "pin", "--tokens", "1 2 3 4", "--for", "5"], 0, "pages"),
            (["cache", "purge", "--tier", "host", "--dry-run"], 0, "Would go"),
            (["cache", "purge", "--tier", "host", "--tier", "storage", "--yes"], 0, "Went"),
        ],
    )
    def test_each_says_what_is_to_know_and_ends_with_its_code(
        self, cache: CacheRank, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
    ) -> None:
        with pytest.raises(SystemExit) as exit:
            main([*arguments, "-s", cache.address])
        assert (exit.value.code or 0) == code
        assert words in capsys.readouterr().out

    def test_an_operation_that_is_not_there_is_looked_for_in_the_list(
        self, cache: CacheRank, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            main(["prefetch", "watch", "nobody", "-s", cache.address])
        said = capsys.readouterr().err
        assert said.startswith("OPERATION_NOT_FOUND: ") and "kvgrpc prefetch list" in said
        assert "kvgrpc health" not in said

    def test_tokens_come_from_a_file_of_either_form(self, cache: CacheRank, tmp_path: Path) -> None:
        cache.fill(hashes_of(prompt(6)))
        for text in ("\n".join(map(str, prompt(6))), json.dumps(prompt(6)), json.dumps({"tokens": prompt(6)})):
            file = tmp_path / "tokens"
            file.write_text(text)
            with pytest.raises(SystemExit) as exit:
                main(["cache", "pin", "--tokens-file", str(file), "-s", cache.address])
            assert not exit.value.code
