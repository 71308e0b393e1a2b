"""Times that the command takes."""

from __future__ import annotations

import pytest

from kvgrpc.cli.main import main


@pytest.mark.parametrize(
    "arguments",
    [("engines", "--timeout"), ("drain", "--grace"), ("events", "verify", "--within"), ("cache", "pin", "--for")],
    ids=" ".join,
)
def test_what_is_no_number_is_wrong_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """No bound refuses NaN, and nothing that waits for so many seconds ends."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "nan", "--server", "127.0.0.1:1"])
    assert ended.value.code == 2
    assert "nan is no number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["inf", "1e300"])
def test_no_wait_is_longer_than_a_clock_counts(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["events", "verify", "--within", seconds, "--server", "127.0.0.1:1"])
    assert ended.value.code == 2
    assert "--within" in capsys.readouterr().err
