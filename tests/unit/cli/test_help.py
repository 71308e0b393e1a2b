"""``kvgrpc --help`` answers at once: it loads no gRPC, no protobuf and no numpy."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import click

from kvgrpc.cli.main import command

SCRIPT = """
import sys
from kvgrpc.cli.main import command
command(["--help"], standalone_mode=False)
print([name for name in ("grpc", "google.protobuf", "numpy", "prometheus_client", "zmq") if name in sys.modules])
"""


def test_the_help_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=50)
    assert "Run a server in the foreground." in done.stdout
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield " ".join((*path, name)), found
        if isinstance(found, click.Group):
            yield from commands(found, (*path, name))


def test_no_command_has_an_option_twice() -> None:
    for name, found in commands(command):
        options = [option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)]
        assert [option for option, count in Counter(options).items() if count > 1] == [], name


def loaded_by(statement: str) -> int:
    count = f"import sys; {statement}; print(len(sys.modules))"
    return int(subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, timeout=50).stdout)


def test_the_client_is_imported_in_at_most_twice_the_time_of_what_it_needs() -> None:
    """Modules stand for time, which a busy machine makes too much of: 1.8 of them were 1.75 of CPU time."""
    assert loaded_by("import kvgrpc.client") <= 2 * loaded_by("import grpc, google.protobuf")
