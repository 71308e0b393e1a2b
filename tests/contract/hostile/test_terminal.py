"""What others wrote, where an operator reads it (issue 10, section 2)."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from kvgrpc.cli.events.batches import batch_as_json, batch_as_text
from kvgrpc.cli.failures import explain
from kvgrpc.cli.output import show_json, show_record, show_table
from kvgrpc.errors import InvalidRequest
from kvgrpc.events.codec import check_batch
from kvgrpc.v1 import registry_service_pb2


def batch(moment: object, event: object = None) -> bytes:
    events = [event if event is not None else {"type": "BlockStored", "block_hashes": [1]}]
    return msgspec.msgpack.encode([moment, events, 0])


class TestBatchesThatNoEngineShouldWrite:
    """The codec admits them, so `events tail` and `replay` must show them and go on."""

    @pytest.mark.parametrize(
        "payload",
        [
            batch(math.nan),
            batch(math.inf),
            batch(-1e300),
            batch(1.0, {"type": "BlockStored", b"\xff": 1, "block_hashes": [1]}),
            batch(1.0, ["BlockStored", [math.nan], None, [], math.inf]),
            batch(1.0, msgspec.Raw(b"\xa1\xff")),
            batch(1.0, msgspec.Raw(b"\x81\x80\x01")),
        ],
        ids=["nan", "inf", "long_ago", "bytes_key", "nan_within", "no_utf8", "map_as_key"],
    )
    def test_are_a_line_each(self, payload: bytes) -> None:
        check_batch(payload)
        for raw in (False, True):
            line = json.loads(batch_as_json(7, payload, raw), parse_constant=pytest.fail)
            assert (line["sequence"], line["rank"]) == (7, 0)
        text = batch_as_text(7, payload)
        assert text.startswith("       7  ") and "\n" not in text

    def test_cost_no_event_beside_them(self) -> None:
        payload = msgspec.msgpack.encode([1.0, [msgspec.Raw(b"\xa1\xff"), ["BlockRemoved", [5]]], 3])
        assert batch_as_text(1, payload).endswith("not readable 1: a1ff; BlockRemoved 1: 5")


class TestForeignText:
    def test_the_command_prints_no_escape_of_others(self, capsys: pytest.CaptureFixture[str]) -> None:
        evil = "\x1b]0;owned\x07\x1b[2J\u202eabc\r\n"
        error = InvalidRequest.of("field" + evil, evil, evil, more=evil)
        explain(error)
        show_table("Rooms", ("room", "why"), [(7, evil)], "")
        show_record("rank", [("engine", evil)])
        said = "".join(capsys.readouterr())
        assert "owned" in said
        assert not {"\x1b", "\x07", "\u202e", "\r"} & set(said)

    def test_json_escapes_it_by_itself(self, capsys: pytest.CaptureFixture[str]) -> None:
        show_json(registry_service_pb2.Engine(name="\x1b[2J"))
        assert "\x1b" not in capsys.readouterr().out
