"""Settings: keyword over environment over file, and nothing misspelt passes in silence."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import kvgrpc
from kvgrpc.cli.main import command
from kvgrpc.errors import InvalidRequest
from kvgrpc.server import CallLimits, settings
from kvgrpc.server.config import KINDS
from kvgrpc.settings import OTHERS, PREFIX, is_near
from kvgrpc.transfer.protocol.types import Bounds

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="no TOML in the standard library")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvgrpc.toml"
    path.write_text(
        'listen = "10.0.0.1:1"\nregistry = "10.0.0.9:8998"\nstart_timeout = 5\nbootstrap_allow = ["10.0.0.0/8"]\n'
        '[bounds]\nrooms = 7\n[events]\npublisher = "zmq"\n'
    )
    return path


@needs_toml
def test_keyword_over_environment_over_file(file: Path) -> None:
    environment = {"KVGRPC_CONFIG": str(file), "KVGRPC_LISTEN": "10.0.0.2:2", "KVGRPC_REGISTRY": "10.0.0.8:1"}
    found = settings({"listen": "10.0.0.3:3"}, environment)
    assert (found["listen"], found["registry"], found["start_timeout"]) == ("10.0.0.3:3", "10.0.0.8:1", 5.0)
    assert found["bootstrap_allow"] == ("10.0.0.0/8",)
    assert found["bounds"] == Bounds(rooms=7)
    assert found["events"] == {"publisher": "zmq"}


def test_a_table_is_json_in_the_environment() -> None:
    found = settings({}, {"KVGRPC_CALL_LIMITS": '{"watches_per_caller": 3}'})
    assert found["call_limits"] == CallLimits(watches_per_caller=3)


@pytest.mark.parametrize(
    ("environment", "field", "hint"),
    [
        ({"KVGRPC_LISSTEN": "x"}, "KVGRPC_LISSTEN", "listen perhaps"),
        ({"KVGRPC_TOKEN_FILES": "s3cret"}, "KVGRPC_TOKEN_FILES", "token_file perhaps"),
        ({"KVGRPC_EVENTS_LISTN": "x"}, "KVGRPC_EVENTS_LISTN", "events_listen perhaps"),
        ({"KVGRPC_TIMEOUTT": "5"}, "KVGRPC_TIMEOUTT", "timeout perhaps"),
        ({"KVGRPC_ETCD_PREFFIX": "/x/"}, "KVGRPC_ETCD_PREFFIX", "etcd_prefix perhaps"),
        ({"KVGRPC_START_TIMEOUT": "soon"}, "start_timeout", "a number"),
        ({"KVGRPC_MAX_FRAME_BYTES": "1.5"}, "max_frame_bytes", "a whole number"),
        ({"KVGRPC_INSECURE": "perhaps"}, "insecure", "true or false"),
        ({"KVGRPC_ROLE": "router"}, "role", "prefill or decode"),
        ({"KVGRPC_BOUNDS": '{"roms": 1}'}, "bounds.roms", "rooms perhaps"),
        ({"KVGRPC_BOUNDS": "[" * 100_000}, "bounds", "a table"),
        ({"KVGRPC_BOUNDS": "7"}, "bounds", "a table"),
        ({"KVGRPC_CONFIG": "/nowhere/kvgrpc.toml"}, "config", "a file that can be read"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_would_be_right(
    environment: dict[str, str], field: str, hint: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        settings({}, environment)
    assert refused.value.metadata["field"] == field
    assert hint in refused.value.message
    assert "s3cret" not in str(refused.value) + str(refused.value.metadata)


@needs_toml
@pytest.mark.parametrize(("content", "field"), [("lissten = 1", "lissten"), ("= nonsense", "config")])
def test_a_file_is_read_as_strictly(tmp_path: Path, content: str, field: str) -> None:
    path = tmp_path / "kvgrpc.toml"
    path.write_text(content)
    with pytest.raises(InvalidRequest) as refused:
        settings({}, {"KVGRPC_CONFIG": str(path)})
    assert refused.value.metadata["field"] == field


def test_a_variable_that_is_like_nothing_of_ours_is_only_said(caplog: pytest.LogCaptureFixture) -> None:
    names = ("KVGRPC_WHATEVER", "KVGRPC_STORAGE_DIRR", "KVGRPC_ROOMS_HELD")
    with caplog.at_level(logging.INFO):
        assert settings({}, {name: "x" for name in names} | {"KVGRPC_SGLANG": "backend"}) == {}
    said = [(record.levelname, record.getMessage().split()[0]) for record in caplog.records]
    assert said == [("WARNING", name) for name in names]


def test_a_variable_that_an_adapter_reads_is_not_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    adapters = Path(kvgrpc.__file__).parent / "engines"
    read = {name for file in adapters.rglob("*.py") for name in re.findall(r'"(KVGRPC_[A-Z_]+)"', file.read_text())}
    assert "KVGRPC_UNTRIED" in read
    with caplog.at_level(logging.INFO):
        settings({}, {name: "x" for name in read if name.removeprefix(PREFIX).lower() not in KINDS})
    assert caplog.messages == []


def test_a_variable_of_an_option_of_the_command_is_no_misspelt_setting(caplog: pytest.LogCaptureFixture) -> None:
    """``kvgrpc --help`` promises it: an operator's own variables must not keep a rank beside him from its start."""
    options = set(variables_of(command, PREFIX)) - {PREFIX + "VERSION"}
    assert "KVGRPC_ROOM_TOKEN_FILE" in options
    names = {name.removeprefix(PREFIX).lower() for name in options} - KINDS.keys() - set(OTHERS)
    assert {name for name in names if is_near(name, KINDS)} == set()
    with caplog.at_level(logging.INFO):
        assert settings({}, {PREFIX + name.upper(): "x" for name in names}) == {}
    assert len(caplog.records) == len(names)


def variables_of(found: click.Command, prefix: str) -> Iterator[str]:
    """The variables that click reads by itself: of each option, under the names of its commands."""
    for each in found.params:
        if isinstance(each, click.Option) and each.name:
            yield prefix + each.name.upper()
    if isinstance(found, click.Group):
        context = click.Context(found)
        for name in found.list_commands(context):
            below = found.get_command(context, name)
            assert below is not None
            yield from variables_of(below, f"{prefix}{name.upper().replace('-', '_')}_")
