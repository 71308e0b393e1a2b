"""``kvgrpc serve index --native``: the index in Rust, a program of its own, in the place of this process."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from kvgrpc.rpc.interceptors import CallLimits
    from kvgrpc.rpc.security import ServerSecurity


def become_native(
    listen: str,
    security: ServerSecurity,
    *,
    registry: str,
    sources: Sequence[str],
    saved: str,
    metrics_listen: str,
    ca_file: str | None,
    token_file: str | None,
    insecure: bool,
    call_limits: CallLimits | None,
    lacking: Mapping[str, object],
) -> NoReturn:
    """Becomes ``kvgrpc-index``. ``lacking``: options that it has not, with what was asked. Raises UsageError."""
    from kvgrpc.client.native_index import PROGRAM, native_index_program

    asked = [option for option, value in lacking.items() if value]
    if asked:
        raise click.UsageError(f"the native index has no {', '.join(asked)}: leave it out, or leave out --native")
    program = native_index_program()
    if program is None:
        raise click.UsageError(f"{PROGRAM} is not installed: `make native` builds it where there is cargo")
    named = {
        "--listen": listen,
        "--registry": registry,
        "--saved": saved,
        "--metrics-listen": metrics_listen,
        "--cert-file": security.cert_file,
        "--key-file": security.key_file,
        "--client-ca-file": security.client_ca_file,
        "--tokens-file": security.token_file,
        "--audience": ",".join(security.audience),
        "--ca-file": ca_file or "",
        "--token-file": token_file or "",
        "--call-limits": json.dumps(dataclasses.asdict(call_limits)) if call_limits is not None else "",
    }
    said = {"--insecure": insecure, "--health-needs-token": not security.health_without_token}
    arguments = [word for option, value in named.items() if value for word in (option, value)]
    arguments += [word for source in sources for word in ("--source", source)]
    arguments += [option for option, is_said in said.items() if is_said]
    os.execv(program, [program, *arguments])
