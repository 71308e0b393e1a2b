"""Commands that read events ask a rank, or an engine's own ZMQ publisher through a relay that they open for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate

import click

from kvgrpc.cli.connection import calls_a_rank
from kvgrpc.errors import PeerUnreachable
from kvgrpc.net import is_unix

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient

# They go on with what comes; the others show what there is.
_FOR_EVER = ("tail", "follow")
_LEAST_ANSWER_SECONDS = 5.0


def calls_a_publisher(function: Callable[Concatenate[SyncClient, ...], None]) -> Callable[..., None]:
    """Gives a command the options of a connection to a rank, or to an engine that runs without kvgrpc."""
    ask_rank = calls_a_rank(function)

    @click.option("--topic", default="", help="With tcp://: only messages whose topic begins so.")
    @click.option(
        "--replay", "replay_endpoint", default="", help="With tcp://: the engine's replay endpoint, tcp://HOST:PORT."
    )
    @functools.wraps(ask_rank)
    def run(*arguments: Any, server: str, replay_endpoint: str, topic: str, **options: Any) -> None:
        if is_unix(server) or "://" not in server:
            if replay_endpoint or topic:
                raise click.UsageError("--replay and --topic are for an engine's own publisher: -s tcp://HOST:PORT")
            return ask_rank(*arguments, server=server, **options)
        if not replay_endpoint and click.get_current_context().info_name not in _FOR_EVER:
            raise click.UsageError("what was published before is at the engine's replay endpoint: name it by --replay")
        from kvgrpc.server import EventRelay

        name, dp, seconds = options["engine"] or "engine", options["dp"], options["timeout"]
        # Without a batch of our own at the beginning its numbers are the engine's.
        events = {"clear_first": False}
        relay = EventRelay("127.0.0.1:0", server, name, dp=dp, replay=replay_endpoint, topic=topic, events=events)
        relay.open()
        try:
            if replay_endpoint and not relay.asked(max(seconds, _LEAST_ANSWER_SECONDS)):
                raise PeerUnreachable(
                    f"the replay endpoint {replay_endpoint} did not answer to its end",
                    metadata={"address": replay_endpoint},
                )
            ask_rank(*arguments, server=relay.address, **options)
        finally:
            relay.close()

    return run
