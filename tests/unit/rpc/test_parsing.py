"""A large message that is parsed in pieces is the one that is parsed whole."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message

from kvgrpc.rpc.interceptors.parsing import PIECE_BYTES, merge_in_pieces
from kvgrpc.v1 import index_service_pb2, prefetch_service_pb2, registry_service_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from tests.support.hostile.largest import plans, prompts, regions, rows, scores

LARGE: list[Message] = [
    regions("a", 1),
    rows("a"),
    *scores(),
    *plans(),
    *(prefetch_service_pb2.LookupRequest(pages=each, without_storage=True) for each in prompts()),
    pb.SessionRequest(forget_rooms=range(60_000)),
    pb.SessionRequest(rooms=[pb.DecodeRoom(room=room, want=pb.WANT_STOP) for room in range(60_000)]),
    pb.SessionResponse(goodbye=pb.Goodbye()),
    index_service_pb2.ScoreRequest(
        engines=["x" * 100_000, "é" * 40_000, *map(str, range(30_000))],
        prompts=[
            index_service_pb2.ScorePrompt(block_hashes=index_service_pb2.BlockHashes(values=[2**64 - 1] * 20_000))
        ],
    ),
    registry_service_pb2.DeregisterRequest(),
]


def in_pieces(kind: type[Message], data: bytes) -> Message:
    message = kind()
    for _ in merge_in_pieces(message, data):
        pass
    return message


@pytest.mark.parametrize("message", LARGE, ids=lambda each: f"{type(each).__name__}-{each.ByteSize()}")
def test_it_is_the_same_message(message: Message) -> None:
    data = message.SerializeToString()
    assert in_pieces(type(message), data) == message


def test_no_piece_takes_long() -> None:
    """Of the message whose parsing at once takes longest. A piece that is long by itself is so each time; one in which
    the processor was another's, or all garbage was looked for, is not."""
    data = regions("a", 1).SerializeToString()
    rounds = [times_of_pieces(registry_service_pb2.RegisterRequest(), data) for _ in range(3)]
    took = [min(times) for times in zip(*rounds, strict=True)]
    assert len(took) > len(data) / PIECE_BYTES / 3 and max(took) < 0.02


def times_of_pieces(message: Message, data: bytes) -> list[float]:
    """CPU time of this thread."""
    steps, found = merge_in_pieces(message, data), list[float]()
    while True:
        began = time.thread_time()
        if next(steps, 0) == 0:
            return found
        found.append(time.thread_time() - began)


@pytest.mark.parametrize("message", [LARGE[0], LARGE[2], LARGE[-5]], ids=["rows", "hashes", "rooms"])
def test_what_is_no_message_whole_is_none_in_pieces(message: Message) -> None:
    data, drawn = message.SerializeToString(), random.Random(7)
    for _ in range(30):
        broken = bytearray(data[: drawn.randrange(len(data))])
        for _ in range(drawn.randrange(3)):
            broken[drawn.randrange(len(broken))] = drawn.randrange(256)
        try:
            whole: Any = type(message).FromString(bytes(broken))
        except DecodeError:
            with pytest.raises(DecodeError):
                in_pieces(type(message), bytes(broken))
        else:
            assert in_pieces(type(message), bytes(broken)) == whole


@pytest.mark.parametrize(
    "data", [b"\x80" * 20, b"\x0a\xff\xff\x03" + bytes(70_000), b"\x0b" * 4, b"\x0a\x05abc", b"\x00\x01"]
)
def test_bytes_that_are_nothing_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        in_pieces(registry_service_pb2.RegisterRequest, data)


def test_a_number_without_an_end_is_not_followed_to_the_end_of_its_field() -> None:
    """A few MiB of such bytes would take a fifth of a second, in which nothing else happens on the loop."""
    looks = 0

    class Looked(bytes):
        def __getitem__(self, at: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().__getitem__(at)

    body = b"\x80" * (1 << 20)
    head = pb.SessionRequest(forget_rooms=[1] * len(body)).SerializeToString()[: -len(body)]
    with pytest.raises(DecodeError):
        in_pieces(pb.SessionRequest, Looked(head + body))
    assert looks < 1_000
