"""Promises about the protos and what is made from them, readable without running a server."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

import grpc
import pytest

from kvgrpc.errors import KvGrpcError, Reason, exception_of
from kvgrpc.v1 import error_reason_pb2

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))
RPC = re.compile(r"((?:^ *//.*\n)+) *rpc (\w+)\(", re.MULTILINE)
GRPC_CODES = set(grpc.StatusCode.__members__)


def test_reasons_have_the_numbers_of_the_proto() -> None:
    assert {reason.full_name: reason.value for reason in Reason} == dict(error_reason_pb2.ErrorReason.items())


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason])
def test_each_reason_has_an_exception_with_a_status_code(reason: Reason) -> None:
    error = exception_of(reason)
    assert error is not KvGrpcError
    assert error.reason is reason
    assert error.code in GRPC_CODES


@pytest.mark.parametrize("proto", PROTOS, ids=lambda proto: proto.name)
def test_each_proto_names_its_go_package(proto: Path) -> None:
    assert 'option go_package = "' in proto.read_text()


@pytest.mark.parametrize("proto", PROTOS, ids=lambda proto: proto.name)
def test_protos_import_well_known_types_and_our_own_only(proto: Path) -> None:
    imported = re.findall(r'^import "(.+)";', proto.read_text(), re.MULTILINE)
    assert [name for name in imported if not name.startswith(("google/protobuf/", "kvgrpc/v1/"))] == []


def rpcs() -> list[tuple[str, str]]:
    return [(name, comment) for proto in PROTOS for comment, name in RPC.findall(proto.read_text())]


@pytest.mark.parametrize(("name", "comment"), rpcs(), ids=[name for name, _ in rpcs()])
def test_each_rpc_says_who_may_call_it_and_how_it_fails(name: str, comment: str) -> None:
    roles = re.search(r"Roles: ([a-z, ]+)\.", comment)
    assert roles is not None
    assert set(roles.group(1).split(", ")) <= {"rank", "consumer", "operator"}
    errors = re.search(r"(?:Errors|Reasons in goodbye): ((?:.|\n)+)", comment)
    assert errors is not None
    known = {reason.name for reason in Reason} | GRPC_CODES
    assert set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", errors.group(1))) <= known | {"WATCH_MODE"}


def test_every_rpc_was_found() -> None:
    assert len(rpcs()) == sum(len(re.findall(r"^ *rpc ", proto.read_text(), re.MULTILINE)) for proto in PROTOS)


FIELD = re.compile(r"^ +(?:repeated |optional )?([\w.]+) (\w+) = \d+(?: \[([^\]]*)\])?;", re.MULTILINE)
# Sizes, addresses of memory (47 bits) and token ids: exact in every language's number.
SMALL_NUMBERS = {"address", "max_frame_bytes", "max_peer_bytes_in_flight", "page_bytes", "page_stride_bytes", "tokens"}


@pytest.mark.parametrize("proto", PROTOS, ids=lambda proto: proto.name)
def test_a_64_bit_id_is_a_string_where_numbers_are_doubles(proto: Path) -> None:
    wide = [found for found in FIELD.findall(proto.read_text()) if found[0] in ("int64", "uint64", "fixed64")]
    assert [name for _, name, options in wide if "JS_STRING" not in options and name not in SMALL_NUMBERS] == []


@pytest.mark.parametrize("proto", PROTOS, ids=lambda proto: proto.name)
def test_no_field_has_the_name_of_a_keyword(proto: Path) -> None:
    assert [name for _, name, _ in FIELD.findall(proto.read_text()) if keyword.iskeyword(name)] == []
