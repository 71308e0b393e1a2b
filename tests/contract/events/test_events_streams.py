"""Which streams of events a process has, as they stand, and which one a request means."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import event_service_pb2 as pb
from tests.support.event_serving import kinds, said, served


async def test_a_stream_is_listed_as_it_stands() -> None:
    async with served(dps=2, topic="kv", buffer_steps=2) as events:
        await events.publish(b"a", b"bb", b"ccc")
        listed = (await events.stub.ListStreams(pb.ListStreamsRequest())).streams
        assert [(stream.engine, stream.dp) for stream in listed] == [("engine", 0), ("engine", 1)]
        first = listed[0]
        assert len(first.log_id) == 32
        assert (first.oldest_sequence, first.next_sequence, first.journal_bytes) == (
            1,
            3,
            len(said(b"bb") + said(b"ccc")),
        )
        assert (first.topic, first.pub_endpoint, first.dropped_batches) == (b"kv", "", 0)
        assert (first.publisher.rank.engine, first.publisher.epoch) == ("engine", 77)
        assert listed[1].oldest_sequence == listed[1].next_sequence == 0
        assert listed[1].log_id != first.log_id


async def test_streams_are_listed_in_pages() -> None:
    async with served(dps=12) as events:
        listed: list[int] = []
        token = ""
        for _ in range(3):
            page = await events.stub.ListStreams(pb.ListStreamsRequest(page_size=5, page_token=token))
            listed += [stream.dp for stream in page.streams]
            token = page.next_page_token
        assert (listed, token) == (list(range(12)), "")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await events.stub.ListStreams(pb.ListStreamsRequest(page_token="nonsense"))
        assert error_from(caught.value).reason.name == "INVALID_REQUEST"


async def test_the_engine_may_be_left_out_where_there_is_one_stream() -> None:
    async with served() as events:
        assert kinds(await events.read()) == kinds(await events.read(engine="engine")) == ["begin"]
    async with served(dps=2) as events:
        assert kinds(await events.read(engine="engine", dp=1)) == ["begin"]
        refused = await events.refusal()
        assert (refused.code, refused.reason.name) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        assert refused.metadata["field"] == "engine"


@pytest.mark.parametrize("fields", [{"engine": "other"}, {"engine": "engine", "dp": 5}, {"dp": 5}], ids=str)
async def test_an_unknown_stream_is_refused(fields: dict[str, Any]) -> None:
    async with served() as events:
        refused = await events.refusal(**fields)
        assert (refused.code, refused.reason.name) == ("NOT_FOUND", "STREAM_NOT_FOUND")
        assert refused.metadata == {"engine": fields.get("engine", ""), "dp": str(fields.get("dp", 0))}


async def test_a_process_without_a_stream_says_so() -> None:
    async with served(dps=0) as events:
        assert not (await events.stub.ListStreams(pb.ListStreamsRequest())).streams
        refused = await events.refusal()
        assert refused.reason.name == "STREAM_NOT_FOUND" and "ask its rank with pp, cp, tp = 0" in refused.message


async def test_who_asks_for_another_stream_is_told_which_there_are() -> None:
    async with served(dps=6) as events:
        said = (await events.refusal(engine="engine", dp=7)).message
    here = "engine dp 0, engine dp 1, engine dp 2, engine dp 3 and 2 more"
    assert said == f"no event stream of engine 'engine' dp 7 here, but {here}"
    async with served() as events:
        said = (await events.refusal(dp=7)).message
    assert said == "no event stream of engine 'engine' dp 7 here, but engine dp 0"
