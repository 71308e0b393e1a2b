"""What the file of scenarios must name, whichever languages the machine has tools for."""

from __future__ import annotations

import re
from pathlib import Path

from kvgrpc.v1.error_reason_pb2 import ErrorReason
from tests.conformance.scenarios.stage import SCENARIOS

COMMANDS = [step["client"] for scenario in SCENARIOS for step in scenario["steps"] if "client" in step]
README = (Path(__file__).parent / "README.md").read_text()


def test_every_reason_that_a_server_can_give_is_refused_with_once() -> None:
    named = {command["engine"].partition(":")[0] for command in COMMANDS if command["op"] == "refuse"}
    assert set(ErrorReason.keys()) - {f"ERROR_REASON_{name}" for name in named} == {"ERROR_REASON_UNSPECIFIED"}


def test_every_command_of_a_driver_is_in_a_scenario() -> None:
    assert set(re.findall(r"^\| `(\w+)` ", README, re.MULTILINE)) == {command["op"] for command in COMMANDS}
