"""The command itself: its subcommands, loaded when they are called, and how a failure ends."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import click

import kvgrpc
from kvgrpc.cli.failures import INTERRUPTED, ToldWith, explain
from kvgrpc.errors import KvGrpcError

# Name -> module below kvgrpc.cli and attribute; in the order of the help.
COMMANDS = {
    "demo": "demo:demo",
    "serve": "serve.command:serve",
    "engines": "fleet.registry:engines",
    "ranks": "fleet.registry:ranks",
    "deregister": "fleet.registry:deregister",
    "sessions": "rooms.command:sessions",
    "rooms": "rooms.command:rooms",
    "room": "rooms.command:room",
    "why": "rooms.why:why",
    "cancel": "rooms.command:cancel",
    "streams": "events.command:streams",
    "events": "events.command:events",
    "prefetch": "cache.prefetch:prefetch",
    "cache": "cache.command:cache",
    "caches": "fleet.tables:caches",
    "pulls": "cache.pulls:pulls",
    "top": "top.command:top",
    "view": "view.command:view",
    "topology": "topology:topology",
    "info": "fleet.server:info",
    "health": "fleet.server:health",
    "drain": "fleet.server:drain",
    "undrain": "fleet.server:undrain",
    "callers": "fleet.callers:callers",
    "config": "config:config",
    "token": "token:token",
    "doctor": "doctor.command:doctor",
}
# Right in every environment, with no need to look further.
OF_A_CONNECTION = ("token", "token_file", "ca_file", "cert_file", "key_file", "insecure")
# What other programs call the server that is asked.
_OTHER_NAMES_OF_SERVER = ("--registry", "--address", "--addr", "--host", "--target", "--endpoint")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 done, 1 the answer is "no", 2 wrong usage, 64 + gRPC status code a refusal."""
    try:
        sys.exit(command(arguments, standalone_mode=False, auto_envvar_prefix="KVGRPC"))
    except click.exceptions.Abort:
        sys.exit(INTERRUPTED)
    except click.ClickException as error:
        error.show()
        if isinstance(error, click.NoSuchOption) and error.option_name in _OTHER_NAMES_OF_SERVER:
            click.echo("The server that is asked is named by --server.", err=True)
        sys.exit(error.exit_code)
    except ToldWith as told:
        sys.exit(explain(told.error, told.next_step))
    except KvGrpcError as error:
        sys.exit(explain(error))


class LazyGroup(click.Group):
    """Imports a subcommand's module when it is used, so that ``kvgrpc --help`` answers at once."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name].split(":")
        loaded = getattr(importlib.import_module(f"kvgrpc.cli.{module}"), attribute)
        assert isinstance(loaded, click.Command)
        return loaded


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvgrpc.__version__, prog_name="kvgrpc")
def command() -> None:
    """The control plane for KV-cache hand-offs between LLM engines.

    Every option can be given as an environment variable: those of a connection as KVGRPC_SERVER or KVGRPC_TOKEN_FILE,
    any other with the name of its command, as KVGRPC_ROOMS_HELD.
    """
    refuse_misspelt_variables(os.environ)


def refuse_misspelt_variables(environment: Mapping[str, str]) -> None:
    """Refuses as a rank does: a command would ask another server than the one that was meant, or listen elsewhere."""
    from kvgrpc.settings import OTHERS, PREFIX, refuse_misspelt

    ours = [name for name in environment if name.startswith(PREFIX) and name == name.upper()]
    unsure = [name for name in ours if name.removeprefix(PREFIX).lower() not in (*OTHERS, *OF_A_CONNECTION)]
    if unsure:
        from kvgrpc.server.config import KINDS  # loads much of a rank, which takes half a second of a busy CPU

        for variable in unsure:
            refuse_misspelt(variable, KINDS)
