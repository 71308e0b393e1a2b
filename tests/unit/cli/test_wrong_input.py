"""What a command is given that it cannot take: wrong usage with the option's name, before anybody is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgrpc.cli.cache import prompt_pages
from kvgrpc.cli.main import main


def ended_with(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xa3\x01", "is no text"), (b"[" * 100_000, "nested too deeply"), (b"1 x", "'x' is no token")],
)
def test_a_file_without_tokens_is_named_by_its_option(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(content)
    code, said = ended_with(["prefetch", "lookup", "--tokens-file", str(file)], capsys)
    assert code == 2 and words in said and "--tokens-file" in said


def test_a_file_that_is_too_long_is_not_cut_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_pages, "_MAX_BYTES", 7)
    file = tmp_path / "tokens"
    file.write_text("1 2 3 45")
    code, said = ended_with(["prefetch", "lookup", "--tokens-file", str(file)], capsys)
    assert code == 2 and "more than 7 characters" in said


@pytest.mark.parametrize("name", ["--registry", "--address"])
def test_who_calls_the_server_otherwise_is_told_its_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ended_with(["engines", name, "127.0.0.1:1"], capsys)
    assert code == 2 and name in said and "--server" in said


@pytest.mark.parametrize("size", ["²", "0", "-1", "x"])
def test_a_size_that_is_none_is_wrong_usage(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ended_with(["topology", "--prefill", f"tp={size}", "--decode", "tp=1"], capsys)
    assert code == 2 and f"tp={size}" in said


@pytest.mark.parametrize("slashes", ["", "//"])
def test_a_directory_is_no_socket(slashes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"unix:{slashes}{tmp_path}"
    code, said = ended_with(["serve", "registry", "--listen", address], capsys)
    assert code == 2 and f"cannot listen on {address}: it is a directory" in said
    code, said = ended_with(["sessions", "-s", address, "--timeout", "0.3"], capsys)
    assert code == 64 + 14 and f"{tmp_path} is a directory" in said


@pytest.mark.parametrize("server", [["registry"], ["index", "--source", "127.0.0.1:1"]], ids=str)
def test_a_wrong_metrics_listen_is_refused_before_a_port_is_open(
    server: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = ended_with(["serve", *server, "--listen", "127.0.0.1:0", "--metrics-listen", "x"], capsys)
    assert code == 2 and "INVALID_REQUEST: metrics_listen: " in said and "drains" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["sessions", "-s", ""],
        ["sessions", "-s", "host"],
        ["sessions", "--cert-file", __file__],
        ["serve", "registry", "--listen", "nonsense"],
        ["serve", "registry", "--listen", "0.0.0.0:0"],
    ],
    ids=str,
)
def test_what_is_wrong_before_a_server_is_asked_is_wrong_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = ended_with(arguments, capsys)
    assert code == 2 and said.startswith(("INVALID_REQUEST: ", "ADDRESS_NOT_ALLOWED: "))


@pytest.mark.parametrize(
    ("variable", "nearest", "arguments"),
    [
        ("KVGRPC_LISSTEN", "listen", ["serve", "registry", "--listen", "nonsense"]),
        ("KVGRPC_SERVR", "server", ["sessions", "-s", "nonsense"]),
    ],
)
def test_a_misspelt_variable_is_refused(
    variable: str,
    nearest: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "a-secret")
    code, said = ended_with(arguments, capsys)
    assert code == 2 and said.startswith(f"INVALID_REQUEST: {variable}: must be {nearest} perhaps")
    assert "a-secret" not in said


@pytest.mark.parametrize("variable", ["KVGRPC_ROOM_TOKEN_FILE", "KVGRPC_SERVICE_HOST", "KVGRPC_TOKEN"])
def test_a_variable_of_an_option_or_of_nobody_is_left_alone(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "x")
    code, said = ended_with(["sessions", "-s", "nonsense"], capsys)
    assert code == 2 and said.startswith("INVALID_REQUEST: --server: ")
