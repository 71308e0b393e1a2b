"""What others wrote, where an operator reads it (issue 10, section 2)."""

from __future__ import annotations

import pytest

from kvgrpc.cli.failures import explain
from kvgrpc.cli.output import show_json, show_record, show_table
from kvgrpc.errors import InvalidRequest
from kvgrpc.v1 import registry_service_pb2


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
