"""``--watch`` of tables: the same look again, until Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

EVERY_SECONDS = 1.0

watch_option = click.option("--watch", is_flag=True, help="Show it anew each second, until Ctrl-C.")


def show_again(watch: bool, look: Callable[[], Callable[[], None]]) -> None:
    """``look`` asks, and returns what shows the answer; once, or with ``watch`` until the command is ended.

    A terminal is cleared only when the next answer is there; in a pipe an empty line is between two.
    """
    look()()
    while watch:
        time.sleep(EVERY_SECONDS)
        show = look()
        if sys.stdout.isatty():
            click.clear()
        else:
            click.echo()
        show()
        sys.stdout.flush()
