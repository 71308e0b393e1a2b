"""``kvgrpc config``: all that is wrong with settings is said before a rank is started, and where each comes from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvgrpc.cli.main import main

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="no TOML in the standard library")


def ended_with(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


@needs_toml
@pytest.mark.parametrize(
    ("content", "fields"),
    [
        (
            'lissten = "x"\nlease_ttl = 0.1\nlisten = "a:1"\n[bounds]\nrooms = 0\n',
            ["lissten", "lease_ttl", "bounds.rooms"],
        ),
        ("[timing]\nheartbeat = 700\n", ["timing.idle_timeout"]),
        ('data_plane = "pigeons"', ["data_plane"]),
        ('listen = "0.0.0.0:1"', ["advertise"]),
        ('listen = "10.0.0.1:1"', ["cert_file"]),
        ("[events]\nhwm = 0\n", ["hwm"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_all_that_is_wrong_in_a_file_is_named_at_once(
    content: str, fields: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvgrpc.toml"
    file.write_text(content)
    assert ended_with(["config", "check", str(file)]) == 2
    said = capsys.readouterr().err
    assert [field for field in fields if field not in said] == []


@needs_toml
def test_a_file_that_is_right_is_ok_without_what_an_engine_adds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvgrpc.toml"
    file.write_text('role = "decode"\nregistry = "10.0.0.9:8998"\n[pull]\nholders = 2\n')
    assert ended_with(["config", "check", str(file)]) in (0, None)
    assert "OK" in capsys.readouterr().out


def test_what_is_in_force_is_shown_with_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVGRPC_LEASE_TTL", "7")
    monkeypatch.setenv("KVGRPC_TOKEN", "a-secret-of-twenty-bytes")
    assert ended_with(["config", "show"]) in (0, None)
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert "7.0" in lines["lease_ttl"] and "environment" in lines["lease_ttl"]
    assert "default" in lines["resolve_timeout"]
    assert "a-secret" not in shown
