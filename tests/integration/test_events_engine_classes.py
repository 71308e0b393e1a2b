"""The engines' own classes beside ours: their factories make our publisher, their readers read it, bytes are equal.

Runs where an engine is at hand: ``TEST_SGLANG`` or ``TEST_VLLM`` name a wheel or a site-packages folder, and
``.venv-sglang`` is found by itself. SGLang's file needs pydantic.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvgrpc.events import BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher, decode_batch
from kvgrpc.events.model import AllBlocksCleared

ROOT = Path(__file__).parents[2]
LOADER = ROOT / "tests" / "conformance" / "events" / "engine_classes.py"
RANK_NAMES = {"sglang": "attn_dp_rank", "vllm": "data_parallel_rank"}


def source_of(engine: str) -> Path | None:
    named = os.environ.get(f"TEST_{engine.upper()}")
    found = [Path(named)] if named else sorted(ROOT.glob(f".venv-{engine}/lib/python3*/site-packages"))
    return found[0] if found and found[0].exists() else None


@pytest.fixture(params=["sglang", "vllm"])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    name, before = request.param, set(sys.modules)
    source = source_of(name)
    if source is None:
        pytest.skip(f"{name} is not at hand: TEST_{name.upper()} names its wheel")
    if name == "sglang":
        pytest.importorskip("pydantic")
    specification = importlib.util.spec_from_file_location("engine_classes", LOADER)
    assert specification is not None and specification.loader is not None
    loader = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(loader)
    yield name, loader.load(name, source)
    for module in set(sys.modules) - before:
        if module.split(".")[0] == name:
            del sys.modules[module]


def batches_of(engine: str, classes: Any) -> list[Any]:
    more = {} if engine == "sglang" else {"lora_name": None}
    stored = classes.BlockStored([-2, 5], None, [1, 2, 3, 4], 2, None, "GPU", **more)
    removed = classes.BlockRemoved([5], "GPU")
    return [classes.KVEventBatch(float(n), [stored, removed, classes.AllBlocksCleared()]) for n in range(50)]


def heard(socket: zmq.Socket[bytes], publisher: Any, batches: list[Any]) -> list[list[bytes]]:
    """What a subscriber hears of ``batches``, after it is known to hear anything."""
    deadline = time.monotonic() + 20
    warm_up = type(batches[0])(0.5, [])
    while not socket.poll(20):
        assert time.monotonic() < deadline, "nothing was heard in 20 s"
        publisher.publish(msgspec.structs.replace(warm_up))
    for batch in batches:
        publisher.publish(msgspec.structs.replace(batch))
    frames: list[list[bytes]] = []
    while len(frames) < len(batches):
        assert socket.poll(20_000)
        message = socket.recv_multipart()
        if decode_batch(message[2]).ts != 0.5:
            frames.append(message)
    return frames


def factory_config(engine: str, classes: Any, endpoint: str) -> Any:
    settings: dict[str, Any] = {"publisher": "kvgrpc", "endpoint": endpoint, "topic": "kv", "hwm": 1000}
    if engine == "sglang":
        return json.dumps(settings)
    return sys.modules["vllm.config.kv_events"].KVEventsConfig(enable_kv_cache_events=True, **settings)


def test_the_engines_factory_makes_our_publisher_from_its_own_configuration(engine: tuple[str, Any]) -> None:
    name, classes = engine
    classes.EventPublisherFactory.register_publisher("kvgrpc", ZmqEventPublisher)
    config = factory_config(name, classes, "inproc://made-by-" + name)
    made = classes.EventPublisherFactory.create(config, **{RANK_NAMES[name]: 3})
    try:
        assert isinstance(made, ZmqEventPublisher)
        assert made.stream.dp == 3
        assert made.stream.pub_endpoint == f"inproc://made-by-{name}_dp3"
        assert made.publish(classes.KVEventBatch(1.0, []))
        said: Any = made
        assert said.get_publisher_config() is None
        assert made.describe_local_source(16) is None  # no other process reaches inproc
    finally:
        made.shutdown()


def test_a_rank_says_where_others_on_its_host_find_it() -> None:
    made = ZmqEventPublisher(attn_dp_rank=2, endpoint="tcp://*:0", replay_endpoint="tcp://127.0.0.1:0", topic="kv")
    try:
        source: Any = made.describe_local_source(64)
        assert source is not None
        assert source["endpoint"].startswith("tcp://127.0.0.1:")
        assert source["replay_endpoint"] == made.stream.replay_endpoint
        assert (source["dp_rank"], source["topic"], source["block_size"]) == (2, "kv", 64)
    finally:
        made.shutdown()


def test_its_events_have_the_bytes_of_its_own_publisher(engine: tuple[str, Any], tmp_path: Path) -> None:
    name, classes = engine
    batches = batches_of(name, classes)
    rank: dict[str, Any] = {RANK_NAMES[name]: 0}
    theirs = classes.ZmqEventPublisher(**rank, endpoint=f"ipc://{tmp_path}/theirs", topic="kv")
    ours = ZmqEventPublisher(**rank, endpoint=f"ipc://{tmp_path}/ours", topic="kv", clear_first=False)
    try:
        with zmq.Context() as context:
            frames = []
            for publisher, where in ((theirs, "theirs"), (ours, "ours")):
                with context.socket(zmq.SUB) as socket:
                    socket.subscribe(b"kv")
                    socket.connect(f"ipc://{tmp_path}/{where}")
                    frames.append(heard(socket, publisher, batches))
        assert [(topic, payload) for topic, _, payload in frames[0]] == [(t, payload) for t, _, payload in frames[1]]
        sequences = [int.from_bytes(sequence, "big") for _, sequence, _ in frames[1]]
        assert sequences == list(range(sequences[0], sequences[0] + len(batches)))
    finally:
        theirs.shutdown()
        ours.shutdown()


@pytest.mark.parametrize("dialect", [None, "sglang", "vllm"])
def test_its_typed_reader_reads_us_as_we_are_configured_by_default(
    engine: tuple[str, Any], dialect: str | None
) -> None:
    name, classes = engine
    if name == "vllm" and dialect == "sglang":
        pytest.skip("vLLM's class asks for lora_name, which SGLang's events do not have")
    settings: dict[str, Any] = {} if dialect is None else {"dialect": dialect}
    publisher = ZmqEventPublisher(2, endpoint=None, **settings)
    publisher.publish(KVEventBatch(1.0, [BlockStored([-2, 5], 7, [1, 2], 1, None, "CPU"), BlockRemoved([5], "GPU")]))
    publisher.shutdown(5)
    part = publisher.stream.journal.read(0)
    assert part is not None
    first, second = map(msgspec.msgpack.Decoder(classes.KVEventBatch).decode, part.payloads)  # type: ignore[union-attr]
    assert isinstance(first.events[0], classes.AllBlocksCleared)
    stored, removed = second.events
    assert (stored.block_hashes, stored.parent_block_hash, stored.token_ids) == ([-2, 5], 7, [1, 2])
    assert (stored.medium, removed.block_hashes, removed.medium) == ("CPU", [5], "GPU")
    assert getattr(second, RANK_NAMES[name]) == 2
    assert decode_batch(part.payloads[0]).events == [AllBlocksCleared()]  # type: ignore[union-attr]


@pytest.mark.parametrize("first", [0, 20])
def test_its_replay_and_ours_answer_alike(engine: tuple[str, Any], tmp_path: Path, first: int) -> None:
    name, classes = engine
    batches = batches_of(name, classes)
    rank: dict[str, Any] = {RANK_NAMES[name]: 0}
    answers = []
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (classes.ZmqEventPublisher, {}),
        (ZmqEventPublisher, {"clear_first": False}),
    ]
    for kind, more in kinds:
        where = f"ipc://{tmp_path}/{kind.__module__}{first}"
        publisher = kind(**rank, endpoint=where, replay_endpoint=where + "-replay", topic="kv", **more)
        try:
            for batch in batches:
                publisher.publish(msgspec.structs.replace(batch))
            answers.append(replayed(where + "-replay", first, len(batches) - first))
        finally:
            publisher.shutdown()
    assert answers[0] == answers[1]


def replayed(endpoint: str, first: int, expected: int) -> list[list[bytes]]:
    """Everything from ``first`` on, once all of it is there."""
    deadline = time.monotonic() + 20
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.RCVTIMEO, 20_000)
        socket.connect(endpoint)
        while True:
            assert time.monotonic() < deadline
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            frames = [socket.recv_multipart()]
            while frames[-1][-2] != b"\xff" * 8:
                frames.append(socket.recv_multipart())
            if len(frames) > expected:
                return frames
