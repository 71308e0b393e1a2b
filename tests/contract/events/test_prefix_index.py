"""The index over several caches, and its service: it knows what each holds, and one that fails harms no other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from kvgrpc.client import Client, EventFollower, PrefixIndex
from kvgrpc.client.following import prefix_index
from kvgrpc.errors import AddressNotAllowed, InvalidRequest, PeerUnreachable, ServerDraining
from kvgrpc.events.following.index_servicer import IndexServicer
from kvgrpc.hashing import each_block_hash, event_seed, page_hashes, sglang_event_hash, vllm_event_hash
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.server import EventServer
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1.index_service_pb2_grpc import add_IndexServiceServicer_to_server
from tests.support.publishing import Publishing
from tests.support.scoring import question
from tests.support.waiting import until


async def test_an_index_says_once_which_sources_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Several that fail in turn too: what was said of one is not forgotten over the other."""
    monkeypatch.setattr(prefix_index, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(prefix_index, "_ANSWER_SECONDS", 0.3)
    looked: list[str] = []
    ask = PrefixIndex._ask_source

    async def counted(self: PrefixIndex, address: str) -> object:
        looked.append(address)
        return await ask(self, address)

    monkeypatch.setattr(PrefixIndex, "_ask_source", counted)
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind(("127.0.0.1", 0))  # nobody listens, and nobody else gets the port
        sources = [f"127.0.0.1:{free.getsockname()[1]}" for free in (first, second)]
        async with PrefixIndex(sources=sources):
            await until(lambda: len(looked) >= 8)
    told = [message for message in caplog.messages if "looking for caches" in message]
    assert len(told) == 2 and all(any(source in message for message in told) for source in sources)


async def test_an_index_names_the_server_that_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank where a registry is expected: what it answers does not say who it is."""
    for pause in ("FIRST_PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS"):
        monkeypatch.setattr(prefix_index, pause, 0.02)
    monkeypatch.setattr(prefix_index, "LOG_SECONDS", 0.2)
    async with Publishing("a") as engine:
        rank = await asyncio.to_thread(EventServer(engine.publisher, ["127.0.0.1:0"]).open)
        async with PrefixIndex(registry=rank.address):
            await until(lambda: any("more like these" in message for message in caplog.messages))
        await asyncio.to_thread(rank.close)
    lines = [message for message in caplog.messages if "FEATURE_DISABLED" in message]
    assert lines[0].startswith(f"looking for caches at {rank.address}: FEATURE_DISABLED: ")
    assert all(rank.address in line for line in lines)


async def test_a_source_that_is_named_twice_is_asked_once(recwarn: pytest.WarningsRecorder) -> None:
    async with Publishing("a") as engine:
        await engine.store([1])
        async with PrefixIndex(sources=[engine.address, engine.address]) as index:
            await index.until_current(1)
            assert [source.engine for source in index.sources()] == ["a"]
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


async def test_an_engine_that_may_not_be_dialled_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that registered an address to which a token would go in plaintext."""
    monkeypatch.setattr(prefix_index, "LOOK_SECONDS", 0.02)
    async with Publishing("a") as engine:
        await engine.store([1])

        async def registered(_: Client, **__: object) -> AsyncIterator[registry_pb.WatchEnginesResponse]:
            message = registry_pb.WatchEnginesResponse(state_begins=True, state_complete=True)
            for name, address in (("far", "192.0.2.1:50051"), ("a", engine.address)):
                row = registry_pb.RankRow(serves_events=True, endpoints=registry_pb.Endpoints(grpc=address))
                row.rank.rank.engine = name
                message.changes.add(engine=registry_pb.Engine(name=name, registered_ranks=1, rows=[row]))
            yield message
            await asyncio.Event().wait()

        monkeypatch.setattr(Client, "watch_engines", registered)
        async with PrefixIndex(registry="127.0.0.1:1", security=ClientSecurity(token="secret")) as index:
            await index.until_current(1)
            assert index.healthy
            assert [source.engine for source in index.sources()] == ["a"]
    [told] = [message for message in caplog.messages if "following dp0 of far" in message]
    assert "192.0.2.1" in told


async def test_what_was_saved_of_an_engine_that_may_not_be_dialled_is_not_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = str(tmp_path / "index")
    async with Publishing("a") as engine:
        await engine.store([1, 2])
        async with PrefixIndex(sources=[engine.address], saved=saved) as index:
            await until(lambda: len(index.score([1, 2])) == 1)
        start, refused = EventFollower.start, list[str]()

        async def refuse(self: EventFollower) -> None:
            if not refused:
                refused.append(self.address)
                assert self.core.contents is not None, "it was restored"
                raise AddressNotAllowed("a certificate that is being replaced")
            await start(self)

        monkeypatch.setattr(EventFollower, "start", refuse)
        monkeypatch.setattr(prefix_index, "LOOK_SECONDS", 0.02)
        async with PrefixIndex(sources=[engine.address], saved=saved) as index:
            await until(lambda: len(index.score([1, 2])) == 1)
            (source,) = index.sources()
            assert refused and source.counts.snapshots == 0, "it goes on from there all the same"
            assert len(index._table.index.score([1, 2])) == 1, "and once"


async def test_an_index_asks_the_next_replica_of_a_registry_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for pause in ("FIRST_PAUSE_SECONDS", "LONGEST_PAUSE_SECONDS"):
        monkeypatch.setattr(prefix_index, pause, 0.02)
    asked: list[str] = []

    async def watch_engines(client: Client, **_: object) -> AsyncIterator[registry_pb.WatchEnginesResponse]:
        asked.append(client.address)
        if client.address == "127.0.0.1:1":
            raise PeerUnreachable("nobody answers", metadata={"address": client.address})
        yield registry_pb.WatchEnginesResponse(state_begins=True, state_complete=True)
        await asyncio.Event().wait()

    monkeypatch.setattr(Client, "watch_engines", watch_engines)
    async with PrefixIndex(registry="127.0.0.1:1,127.0.0.1:2") as index:
        await until(lambda: index._mirror.complete)
    assert asked == ["127.0.0.1:1", "127.0.0.1:2"]


def test_each_replica_of_an_indexs_registry_is_an_address() -> None:
    with pytest.raises(InvalidRequest, match="registry"):
        PrefixIndex(registry="127.0.0.1:1,nowhere")


async def test_one_index_over_several_engines() -> None:
    async with Publishing("a") as first, Publishing("b", dp=1) as second:
        await first.store([1, 2, 3])
        await second.store([1, 2])
        await second.store([3, 4], "DISK")
        async with PrefixIndex(sources=[first.address, second.address]) as index:
            await index.until_current(2)
            found = index.score([1, 2, 3, 4, 5])
            assert [(one.engine, one.dp, one.device_blocks, one.host_blocks, one.blocks) for one in found] == [
                ("b", 1, 2, 2, 4),
                ("a", 0, 3, 3, 3),
            ]
            assert found[0].freshness is not None and found[0].freshness.log_id == second.publisher.stream.log_id
            assert [one.engine for one in index.score([1], engines=["a"])] == ["a"]
            assert index.score([9]) == []
            assert [one.engine for one in index.score([1, 2, 3, 4], most=1)] == ["b"]
            assert [(one.engine, one.dp, one.blocks) for one in index.sources()] == [
                ("a", 0, {"GPU": 3}),
                ("b", 1, {"DISK": 2, "GPU": 2}),
            ]


class TestIndexService:
    @pytest.fixture
    async def client(self) -> AsyncIterator[Client]:
        async with AsyncExitStack() as stack:
            self.engines = [await stack.enter_async_context(Publishing(name)) for name in ("a", "b", "c")]
            index = PrefixIndex(sources=[engine.address for engine in self.engines])
            await stack.enter_async_context(index)
            self.servicer = IndexServicer(index)
            server = grpc.aio.server(interceptors=interceptors_of(ServerSecurity()), options=SERVER_OPTIONS)
            add_IndexServiceServicer_to_server(self.servicer, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            await index.until_current(3)
            yield await stack.enter_async_context(Client(f"127.0.0.1:{port}"))
            await server.stop(0)

    async def scores(self, client: Client, request: pb.ScoreRequest) -> list[tuple[str, int]]:
        (found,) = (await client.score(request)).prompts
        return [(score.engine, score.blocks) for score in found.scores]

    async def test_hashes_are_scored(self, client: Client) -> None:
        a, b, _ = self.engines
        await a.store([1, -2])
        await b.store([1])
        asked = question(hashes=[1, 2**64 - 2, 3])

        async def known() -> bool:
            return await self.scores(client, asked) == [("a", 2), ("b", 1)]

        await until(known)
        (response,) = (await client.score(asked)).prompts
        assert response.blocks == 3
        asked.max_scores = 1
        assert await self.scores(client, asked) == [("a", 2)]
        fresh = response.scores[0].freshness
        assert fresh.log_id == a.publisher.stream.log_id
        assert (fresh.next_sequence, fresh.lag_batches, fresh.whole) == (a.next_sequence, 0, True)
        assert fresh.state == pb.INDEX_SOURCE_STATE_CURRENT
        assert fresh.HasField("idle_time")

    async def test_tokens_are_hashed_as_the_engines_do(self, client: Client) -> None:
        tokens = list(range(100, 170))
        a, b, c = self.engines
        await a.store([sglang_event_hash(one) for one in page_hashes(tokens[:64], 16)])
        salted = page_hashes(tokens[:33], 16, after=event_seed("tenant"), bigram=True)
        await b.store([sglang_event_hash(one) for one in salted])
        hashed = each_block_hash(tokens, 32, hash_seed="0", algorithm="sha256_cbor", lora=("adapter", "/adapter"))
        await c.store([vllm_event_hash(one) for one in hashed])
        sglang = pb.SglangPrompt(token_ids=tokens, page_tokens=16)
        eagle = pb.SglangPrompt(token_ids=tokens, page_tokens=16, cache_salt="tenant", bigram=True)
        vllm = pb.VllmPrompt(
            token_ids=tokens,
            page_tokens=32,
            hash_seed="0",
            algorithm="sha256_cbor",
            lora=pb.LoraAdapter(name="adapter", path="/adapter"),
        )

        async def known() -> bool:
            return (
                await self.scores(client, question(sglang=sglang)) == [("a", 4)]
                and await self.scores(client, question(sglang=eagle)) == [("b", 2)]
                and await self.scores(client, question(vllm=vllm)) == [("c", 2)]
            )

        await until(known)
        assert (await client.score(question(sglang=sglang))).prompts[0].blocks == 4

    @pytest.mark.parametrize(
        ("request_", "field"),
        [
            (pb.ScoreRequest(), "prompts"),
            (pb.ScoreRequest(prompts=[pb.ScorePrompt()] * 1025), "prompts"),
            (question(), "prompts[0].prefix"),
            (question(hashes=[0] * 65_537), "prompts[0].block_hashes.values"),
            (question(sglang=pb.SglangPrompt(token_ids=[1] * 70_000, page_tokens=1)), "prompts[0].sglang.token_ids"),
            (question(vllm=pb.VllmPrompt(token_ids=[1], page_tokens=1, algorithm="md5")), "prompts[0].vllm.algorithm"),
            (
                question(vllm=pb.VllmPrompt(multimodal=[pb.MultimodalItem(identifier="i", first_token=1)])),
                "prompts[0].vllm.multimodal[0]",
            ),
            (question(vllm=pb.VllmPrompt(page_tokens=32, hash_tokens=12)), "prompts[0].vllm.hash_tokens"),
            (question(vllm=pb.VllmPrompt(lookahead_tokens=65)), "prompts[0].vllm.lookahead_tokens"),
            (pb.ScoreRequest(prompts=[pb.ScorePrompt()], max_staleness=Duration(seconds=-1)), "max_staleness"),
        ],
    )
    async def test_what_cannot_be_scored_is_refused_by_its_field(
        self, client: Client, request_: pb.ScoreRequest, field: str
    ) -> None:
        with pytest.raises(InvalidRequest) as refused:
            await client.score(request_)
        assert refused.value.metadata["field"] == field

    async def test_sources_are_listed_in_pages(self, client: Client) -> None:
        assert [source.engine for source in await client.list_sources()] == ["a", "b", "c"]
        page = await self.servicer.ListSources(pb.ListSourcesRequest(page_size=2), None)
        assert [source.engine for source in page.sources] == ["a", "b"]
        rest = await self.servicer.ListSources(pb.ListSourcesRequest(page_token=page.next_page_token), None)
        assert [source.engine for source in rest.sources] == ["c"]
        assert not rest.next_page_token
        with pytest.raises(InvalidRequest, match="page_token"):
            await self.servicer.ListSources(pb.ListSourcesRequest(page_token="nonsense"), None)

    async def test_a_state_that_nobody_knows_is_refused(self, client: Client) -> None:
        """An answer without sources would say that no cache is followed."""
        unknown: Any = 99
        with pytest.raises(InvalidRequest) as refusal:
            await client.list_sources(states=[pb.INDEX_SOURCE_STATE_CURRENT, unknown])
        assert refusal.value.metadata["field"] == "states[1]"
        assert "INDEX_SOURCE_STATE_CURRENT" in refusal.value.metadata["rule"]

    async def test_those_in_one_state_are_listed_alone_and_all_are_counted(self, client: Client) -> None:
        await self.engines[1].hang_up()

        async def listed(state: pb.IndexSourceState.ValueType) -> list[str]:
            return [source.engine for source in await client.list_sources(states=[state])]

        async def b_is_away() -> bool:
            return await listed(pb.INDEX_SOURCE_STATE_CONNECTING) == ["b"]

        await until(b_is_away)
        assert await listed(pb.INDEX_SOURCE_STATE_CURRENT) == ["a", "c"]
        told = await client.list_sources(states=[pb.INDEX_SOURCE_STATE_REBUILDING])
        assert (list(told), dict(told.counts)) == (
            [],
            {pb.INDEX_SOURCE_STATE_CONNECTING: 1, pb.INDEX_SOURCE_STATE_CURRENT: 2},
        )

    async def test_a_draining_index_says_so(self, client: Client) -> None:
        self.servicer.drain()
        with pytest.raises(ServerDraining):
            await self.servicer.Score(pb.ScoreRequest(), None)
