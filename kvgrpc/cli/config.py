"""``kvgrpc config``: settings of a rank before there is one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvgrpc.server.config import RankConfig


@click.group()
def config() -> None:
    """Check and show settings of a rank, before it is started. Of a running one: kvgrpc info --settings."""


@config.command()
@click.argument("file", type=click.Path())
def check(file: str) -> None:
    """Say all that is wrong in a FILE of settings (TOML, as KVGRPC_CONFIG names it); exit code 2 if anything is.

    What an engine adds when it opens a rank, as its memory, is checked then.
    """
    from kvgrpc.server.check import check_settings
    from kvgrpc.settings import CONFIG, PREFIX

    rank = _configured({PREFIX + CONFIG.upper(): file})
    check_settings(rank)
    rank.server_security.check(rank.listen)
    click.echo(f"{file}: OK")


@config.command()
def show() -> None:
    """Show the settings that a rank started from here would have, and where each comes from."""
    from kvgrpc.cli.fleet.server import show_settings
    from kvgrpc.server.port.description import settings_in_force

    show_settings("a rank started here", settings_in_force(_configured(os.environ)))


def _configured(environment: Mapping[str, str]) -> RankConfig:
    """With stand-ins for what an engine says. Raises InvalidRequest."""
    from kvgrpc.model import Role
    from kvgrpc.server.config import RankConfig, settings

    return RankConfig(**{"engine": "", "role": Role.UNIFIED, "pools": (), **settings({}, environment)})
