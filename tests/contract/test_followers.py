"""Followers and the index over real servers: what they know is what the cache holds, whatever happened in between."""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import zmq
import zmq.asyncio
from google.protobuf.duration_pb2 import Duration

from kvgrpc.client import (
    Client,
    EventFollower,
    Heartbeat,
    Payloads,
    PrefixIndex,
    Snapshot,
    SyncEventFollower,
    SyncPrefixIndex,
)
from kvgrpc.client.following import prefix_index
from kvgrpc.client.following.live import LiveFrames
from kvgrpc.errors import AddressNotAllowed, InvalidRequest, PeerUnreachable, ServerDraining, StaleLog
from kvgrpc.events.following.index import Match
from kvgrpc.events.following.index_servicer import IndexServicer
from kvgrpc.events.following.messages import FollowerState
from kvgrpc.hashing import each_block_hash, event_seed, page_hashes, sglang_event_hash, vllm_event_hash
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.server import EventServer
from kvgrpc.v1 import event_service_pb2 as events_pb
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1.index_service_pb2_grpc import add_IndexServiceServicer_to_server
from tests.support.publishing import Publishing
from tests.support.scoring import question
from tests.support.waiting import until

LIVE: dict[str, Any] = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0"}


def knows(follower: EventFollower, engine: Publishing, blocks: Iterable[int] = range(20)) -> bool:
    """Whether the follower is current and knows what the cache holds."""
    if follower.state is not FollowerState.CURRENT or follower.freshness.next_sequence != engine.next_sequence:
        return False
    for block in blocks:
        assert follower.media_of(block) == engine.media_of(block), block
    return True


async def test_a_follower_knows_what_was_there_and_what_came() -> None:
    async with Publishing() as engine:
        await engine.store([1, 2, 3])
        await engine.store([2, -5], "CPU")
        async with EventFollower(engine.address) as follower:
            await follower.until_current()
            assert knows(follower, engine)
            assert follower.match([1, 2, 3, 4]) == Match(3, 3, 3, 3)
            assert follower.media_of(2**64 - 5) == {"CPU"}
            assert follower.blocks == {"CPU": 2, "GPU": 3}
            await engine.remove([1])
            await engine.store([4])
            await until(lambda: knows(follower, engine))
            assert follower.match([1]) == Match(0, 0, 0, 0)
            await engine.clear()
            await until(lambda: knows(follower, engine))
            assert follower.blocks == {}
            assert follower.counts.snapshots == 1


async def test_a_follower_goes_on_where_a_connection_broke() -> None:
    async with Publishing() as engine, EventFollower(engine.address) as follower:
        await engine.store([1])
        await follower.until_current()
        await engine.hang_up()
        await engine.store([2])
        await until(lambda: follower.state is FollowerState.CONNECTING)
        assert follower.match([1]) == Match(1, 1, 1, 1)
        await engine.serve()
        await until(lambda: knows(follower, engine))
        assert follower.counts.snapshots == 1


async def test_another_log_is_another_cache() -> None:
    async with Publishing() as engine, EventFollower(engine.address) as follower:
        await engine.store([1, 2])
        await until(lambda: knows(follower, engine))
        before = follower.freshness.log_id
        await engine.restart()
        await engine.store([3])
        await until(lambda: follower.freshness.log_id != before and knows(follower, engine))
        assert follower.match([1]) == Match(0, 0, 0, 0)
        assert follower.counts.new_logs == 1


async def test_a_follower_that_fell_behind_takes_a_snapshot() -> None:
    async with Publishing(buffer_steps=3) as engine, EventFollower(engine.address) as follower:
        await engine.store([1])
        await until(lambda: knows(follower, engine))
        await engine.hang_up()
        for block in range(2, 12):
            await engine.store([block])
        await engine.remove([1])
        await engine.serve()
        await until(lambda: knows(follower, engine))
        assert follower.counts.snapshots == 2


async def test_without_snapshots_a_follower_reads_the_log_from_its_beginning() -> None:
    async with Publishing(snapshots=False) as engine:
        await engine.store([1, 2])
        async with EventFollower(engine.address) as follower:
            await until(lambda: knows(follower, engine))
            assert follower.freshness.whole


async def test_without_snapshots_and_without_the_beginning_it_says_that_there_may_be_more() -> None:
    async with Publishing(snapshots=False, buffer_steps=1) as engine:
        await engine.store([1])
        await engine.store([2])
        async with EventFollower(engine.address) as follower:
            await until(lambda: follower.state is FollowerState.CURRENT)
            assert not follower.freshness.whole
            assert (follower.match([1]).device, follower.match([2]).device) == (0, 1)
            await engine.clear()
            await until(lambda: knows(follower, engine))
            assert follower.freshness.whole


async def test_the_digest_is_compared() -> None:
    async with Publishing() as engine, EventFollower(engine.address) as follower:
        await engine.store(range(100))
        await until(lambda: follower.counts.digests_equal >= 2)
        contents = follower.core.contents
        assert contents is not None
        contents.blocks.stored("GPU", [777])
        contents._digest.add("GPU", 0, [777], 1)
        await until(lambda: follower.counts.digests_different == 1)
        await until(lambda: knows(follower, engine, [*range(100), 777]))


@pytest.mark.parametrize("live", [False, True], ids=["watch", "pub"])
async def test_the_digest_is_compared_while_the_stream_is_never_idle(live: bool) -> None:
    async with Publishing(**(LIVE if live else {})) as engine, EventFollower(engine.address, live=live) as follower:
        await follower.until_current()

        async def publish() -> None:
            while True:
                await engine.store([next(numbers) % 5000])
                await asyncio.sleep(0)

        numbers = itertools.count()
        publishing = asyncio.create_task(publish())
        await until(lambda: follower.counts.digests_equal >= 3)
        assert not publishing.done()
        publishing.cancel()
        assert follower.counts.digests_different == 0


async def test_live_frames_bring_what_follows() -> None:
    async with Publishing(**LIVE) as engine, EventFollower(engine.address, live=True) as follower:
        await engine.store([1])
        await follower.until_current()
        for block in range(2, 18):
            await engine.store([block], "CPU" if block % 2 else None)
        await until(lambda: knows(follower, engine))
        assert (follower.counts.snapshots, follower.counts.failures) == (1, 0)
        await engine.restart()
        await engine.store([5])
        await until(lambda: follower.counts.new_logs == 1 and knows(follower, engine))


async def test_what_live_frames_lost_is_read_again() -> None:
    async with Publishing(**LIVE) as engine, EventFollower(engine.address, live=True) as follower:
        await engine.store([1])
        await follower.until_current()
        core, live, frames = follower.core, follower.core.live, []

        def lossy(sequence: int, payload: bytes, now: float) -> None:
            frames.append(sequence)
            if sequence % 3:
                live(sequence, payload, now)

        core.live = lossy  # type: ignore[method-assign]
        for block in range(2, 14):
            await engine.store([block])
            await engine.remove([block - 1])
        await until(lambda: knows(follower, engine))
        assert frames and follower.counts.replays > 0
        assert follower.counts.snapshots == 1


async def test_the_end_that_live_frames_lost_is_read_again() -> None:
    """Nothing comes after it that would show the gap."""
    async with Publishing(**LIVE) as engine, EventFollower(engine.address, live=True) as follower:
        await engine.store([1])
        await until(lambda: knows(follower, engine))
        follower.core.live = lambda sequence, payload, now: None  # type: ignore[method-assign]
        for block in range(2, 6):
            await engine.store([block])
        await until(lambda: knows(follower, engine))
        assert (follower.counts.replays, follower.counts.snapshots) == (1, 1)


async def test_an_endpoint_that_no_socket_takes_costs_the_live_frames_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A publisher says it: it must not make the process that follows unhealthy for good."""
    async with Publishing(**LIVE) as engine:
        engine.publisher.stream.pub_endpoint = "tcp://engine-7"
        async with EventFollower(engine.address, live=True) as follower:
            for block in (1, 2, 3):
                await engine.store([block])
                await until(lambda: knows(follower, engine))
            assert follower.counts.failures == 0
    assert [record.message for record in caplog.records if "background task" in record.message] == []
    assert any("no live frames from 'tcp://engine-7'" in record.message for record in caplog.records)


async def test_a_publisher_that_floods_leaves_turns_of_the_loop_to_others() -> None:
    """It sends the next frame before the last one is folded."""
    context: Any = zmq.Context(zmq.asyncio.Context.instance())
    taken = others = 0
    with context.socket(zmq.XPUB) as publisher:
        publisher.bind("inproc://flood")

        def on_frame(sequence: int, payload: bytes) -> None:
            nonlocal taken
            taken += 1
            if not others and taken < 20_000:
                publisher.send_multipart([b"", sequence.to_bytes(8, "big"), payload])

        frames = LiveFrames("127.0.0.1:1", on_frame)
        frames.subscribe("inproc://flood", b"")
        await until(lambda: publisher.poll(0) != 0)
        publisher.send_multipart([b"", bytes(8), b"one"])
        await until(lambda: taken > 0)
        others = 1
        assert taken < 20_000
        await frames.close()


async def test_nobody_there_is_said_and_tried_again() -> None:
    async with Publishing() as engine:
        await engine.hang_up()
        async with EventFollower(engine.address) as follower:
            with pytest.raises(PeerUnreachable, match=r"not current after 0\.3 s, connecting; PEER_UNREACHABLE"):
                await follower.until_current(0.3)
            await engine.serve()
            await follower.until_current()


@pytest.mark.parametrize("seconds", [0.0, -1.0, -60.0])
async def test_a_wait_whose_time_is_over_looks_once(seconds: float) -> None:
    """Who waits for several gives each what is left of one time, and that is negative where it is over."""
    async with Publishing() as engine, EventFollower(engine.address) as follower:
        await follower.until_current()
        await follower.until_current(seconds)
    with pytest.raises(PeerUnreachable, match="not current"):
        await EventFollower("127.0.0.1:1").until_current(seconds)
    index = PrefixIndex(sources=["127.0.0.1:1"])
    await index.until_current(0, seconds)
    with pytest.raises(TimeoutError, match="caches are current"):
        await index.until_current(1, seconds)

    def plain() -> None:
        with pytest.raises(PeerUnreachable, match="not current"):
            SyncEventFollower("127.0.0.1:1").until_current(seconds)
        with pytest.raises(TimeoutError, match="caches are current"):
            SyncPrefixIndex(sources=["127.0.0.1:1"]).until_current(1, seconds)

    await asyncio.to_thread(plain)


async def test_a_wait_may_be_for_ever_and_not_for_no_number() -> None:
    async with Publishing() as engine, EventFollower(engine.address) as follower:
        await follower.until_current(math.inf)
        async with PrefixIndex(sources=[engine.address]) as index:
            await index.until_current(1, math.inf)

        def plain() -> None:
            with SyncEventFollower(engine.address) as same, SyncPrefixIndex(sources=[engine.address]) as indexed:
                same.until_current(math.inf)
                indexed.until_current(1, math.inf)
                for wait in (same.until_current, partial(indexed.until_current, 1)):
                    with pytest.raises(InvalidRequest, match="timeout"):
                        wait(math.nan)

        await asyncio.to_thread(plain)
        for each in (follower.until_current(math.nan), PrefixIndex(sources=["127.0.0.1:1"]).until_current(1, math.nan)):
            with pytest.raises(InvalidRequest, match="timeout"):
                await each


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

    async def test_a_draining_index_says_so(self, client: Client) -> None:
        self.servicer.drain()
        with pytest.raises(ServerDraining):
            await self.servicer.Score(pb.ScoreRequest(), None)


class TestWatchGoesOn:
    async def test_a_tail_goes_on_behind_its_last_batch(self) -> None:
        async with Publishing(clear_first=False) as engine, Client(engine.address) as client:
            await engine.store([1])
            read: list[object] = []

            async def reading() -> None:
                async for part in client.watch(mode=events_pb.WATCH_MODE_TAIL):
                    if not isinstance(part, Heartbeat):
                        read.append(part)

            task = asyncio.ensure_future(reading())
            await until(lambda: len(read) == 2)
            await engine.hang_up()
            await engine.store([2])
            await engine.serve()
            await until(lambda: len(read) == 3)
            assert [part.first_sequence for part in read if isinstance(part, Payloads)] == [0, 1]
            await engine.restart()
            with pytest.raises(StaleLog):
                await asyncio.wait_for(task, 20)

    async def test_a_snapshot_goes_on_as_a_tail(self) -> None:
        async with Publishing() as engine, Client(engine.address) as client:
            await engine.store([1])
            read: list[object] = []

            async def reading() -> None:
                async for part in client.watch(mode=events_pb.WATCH_MODE_SNAPSHOT):
                    if not isinstance(part, Heartbeat):
                        read.append(part)

            task = asyncio.ensure_future(reading())
            await until(lambda: len(read) == 2)
            await engine.hang_up()
            await engine.store([2])
            await engine.serve()
            await until(lambda: len(read) == 3)
            assert isinstance(read[1], Snapshot) and read[1].last
            assert isinstance(read[2], Payloads) and read[2].first_sequence == read[1].next_sequence
            task.cancel()

    async def test_nobody_who_comes_back_is_said_in_time(self) -> None:
        async with Publishing() as engine, Client(engine.address, timeout=3.0) as client:
            parts = client.watch(mode=events_pb.WATCH_MODE_TAIL)
            await anext(parts)
            await engine.hang_up()
            begin = time.monotonic()
            with pytest.raises(PeerUnreachable):
                async for _ in parts:
                    pass
            assert time.monotonic() - begin < 15


async def test_the_same_for_plain_code() -> None:
    async with Publishing() as engine:
        await engine.store([1, 2])

        def plain() -> None:
            with SyncEventFollower(engine.address) as follower:
                follower.until_current()
                assert follower.match([1, 2, 3]) == Match(2, 2, 2, 2)
                assert follower.blocks == {"GPU": 2}
            with SyncPrefixIndex(sources=[engine.address]) as index:
                index.until_current()
                assert [score.blocks for score in index.score([1, 2, 3])] == [2]

        await asyncio.to_thread(plain)
