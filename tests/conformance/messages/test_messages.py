"""Messages as bytes and as JSON, both ways: what the other languages' tests do with the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf import json_format, symbol_database
from google.protobuf.message import Message

import kvgrpc.v1.event_service_pb2
import kvgrpc.v1.index_service_pb2
import kvgrpc.v1.prefetch_service_pb2
import kvgrpc.v1.registry_service_pb2  # noqa: F401  # each puts its messages where they are found by name
from tests.conformance.messages.make_messages import MESSAGES

FOLDER = Path(__file__).parent


def message_of(name: str) -> Message:
    message: Message = symbol_database.Default().GetSymbol(f"kvgrpc.v1.{name.partition('.')[0]}")()
    return message


@pytest.mark.parametrize("name", MESSAGES)
def test_bytes_and_json_of_a_message_are_made_of_each_other(name: str) -> None:
    written, told = (FOLDER / f"{name}.binpb").read_bytes(), json.loads((FOLDER / f"{name}.json").read_text())
    message = message_of(name)
    message.MergeFromString(written)
    assert json.loads(json_format.MessageToJson(message)) == told
    again = message_of(name)
    json_format.ParseDict(told, again)
    # Not the same bytes: of a oneof and a NaN each encoder has its own for what is equal.
    assert json.loads(json_format.MessageToJson(message_of(name).FromString(again.SerializeToString()))) == told
    assert again.ByteSize() == len(written)


def test_each_file_is_of_a_case() -> None:
    assert (
        {path.stem for path in FOLDER.glob("*.binpb")} == {path.stem for path in FOLDER.glob("*.json")} == set(MESSAGES)
    )
