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
