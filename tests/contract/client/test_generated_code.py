"""The generated code of grpcio-tools 1.75.0 works on the protobuf that is installed here, 6 or 7."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

FILES = sorted(path.stem for path in (Path(__file__).parents[3] / "protos" / "kvgrpc" / "v1").glob("*.proto"))


@pytest.mark.parametrize("name", FILES)
def test_it_loads_without_a_warning(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(module(name))


@pytest.mark.parametrize("name", FILES)
def test_every_message_survives_bytes_and_json(name: str) -> None:
    for descriptor in module(name).DESCRIPTOR.message_types_by_name.values():
        message = filled(descriptor)
        kind = type(message)
        assert kind.FromString(message.SerializeToString(deterministic=True)) == message
        assert json_format.Parse(json_format.MessageToJson(message), kind()) == message


@pytest.mark.parametrize("name", FILES)
def test_descriptors_carry_json_names_so_that_reflection_shows_them(name: str) -> None:
    for descriptor in module(name).DESCRIPTOR.message_types_by_name.values():
        for field in descriptor.fields:
            head, *tail = field.name.split("_")
            assert field.json_name == head + "".join(word.capitalize() for word in tail)


def module(name: str) -> ModuleType:
    return importlib.import_module(f"kvgrpc.v1.{name}_pb2")


def filled(descriptor: Descriptor, depth: int = 0) -> Message:
    """A message with its first fields of plain type set, and messages inside to a depth of two."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if field.containing_oneof is not None and message.WhichOneof(field.containing_oneof.name):
            continue
        if field.is_repeated:
            continue
        if field.message_type is None:
            setattr(
                message, field.name, type(field.default_value)(1) if field.type != field.TYPE_BYTES else b"\x01\xff"
            )
        elif depth < 2 and field.message_type.file.package == "kvgrpc.v1":
            getattr(message, field.name).CopyFrom(filled(field.message_type, depth + 1))
    return message
