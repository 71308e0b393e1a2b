"""``--watch``: the same table again, until it is ended."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest

from kvgrpc.cli import again
from kvgrpc.cli.main import command


@pytest.mark.parametrize("name", ["rooms", "sessions", "caches", "pulls", "streams", "engines"])
def test_tables_that_change_can_be_watched(name: str) -> None:
    found = command.get_command(click.Context(command), name)
    assert found is not None and "watch" in [parameter.name for parameter in found.params]


def test_each_look_is_shown_once_it_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(again, "EVERY_SECONDS", 0.0)
    looks = 0

    def look() -> Callable[[], None]:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt
        number = looks
        return lambda: print(f"look {number}")

    with pytest.raises(KeyboardInterrupt):
        again.show_again(True, look)
    assert capsys.readouterr().out == "look 1\n\nlook 2\n"


def test_without_it_one_look_is_all(capsys: pytest.CaptureFixture[str]) -> None:
    again.show_again(False, lambda: lambda: print("look"))
    assert capsys.readouterr().out == "look\n"
