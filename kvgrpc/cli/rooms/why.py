"""``kvgrpc why``: the story of one room, wherever in the fleet it is known."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import click

from kvgrpc.cli.connection import calls_a_registry, json_option
from kvgrpc.cli.failures import ToldWith
from kvgrpc.cli.fleet.tables import unanswered, with_short_names
from kvgrpc.cli.names import rank_name, role_name, row_name
from kvgrpc.cli.output import columns_here, counted, milliseconds, show_record, show_table, wide_option
from kvgrpc.cli.rooms.command import ATTEMPT, ROOM, ROOM_COLUMNS, STAGES, failure_fields, room_row
from kvgrpc.cli.rooms.story import look_at_room, steps_of
from kvgrpc.errors import Reason, RoomNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgrpc.cli.rooms.story import RoomSide, Story
    from kvgrpc.client import SyncClient
    from kvgrpc.v1 import transfer_service_pb2

_NAMED = 5
COLUMNS = ("rank", "role", *ROOM_COLUMNS[2:])
FIRST_TO_GO = ("role", "peer", *STAGES, "writes", "#held", "#age")
STEP_COLUMNS = ("at, UTC", "#after", "rank", "what")
# Of a room that failed; what is said of a call that was refused with the same reason is another thing.
NEXT_STEPS = {
    Reason.ROOM_CANCELLED: "Whoever is named in `by` gave the request up: its engine's log says why.",
    Reason.ROOM_NOT_FOUND: "Prefill never got the request: look at its own log and queue, and at what the router sent.",
    Reason.ROOM_CONFLICT: "The router used a room and attempt twice: it needs a new attempt, or a new room.",
    Reason.ROOM_DEADLINE: "One side waited in vain: the state of the other one above says for what.",
    Reason.PEER_LOST: "Try again at another rank; `kvgrpc sessions --fleet` shows whether the pair is back.",
    Reason.TRANSFER_FAILED: "Try again; where it repeats between two hosts, look at their data plane and network.",
    Reason.CHECKSUM_MISMATCH: "Try again; where it repeats between two hosts, suspect their memory or network.",
    Reason.TOO_MANY_REQUESTS: "Try again after the time given, or at another rank at once; `scope` says what is full.",
    Reason.PAGES_IN_USE: "The engine gave a page that another of its rooms has: a bug of it or its adapter.",
    Reason.PAGES_HELD: "Pages wait for evidence: `kvgrpc rooms --held --fleet` shows them and whom they wait for.",
    Reason.SERVER_DRAINING: "The rank leaves: try again at another one.",
    Reason.ENGINE_NOT_FOUND: "`kvgrpc engines` lists what is registered, and which ranks an engine lacks.",
    Reason.PARALLEL_LAYOUT_MISMATCH: "The two engines do not fit: the fields above differ, in their configurations.",
    Reason.KV_INDEX_OUT_OF_RANGE: "The engine named a page that its pool does not have: a bug of its adapter.",
}

# Of a room of which nobody told.
NO_RANKS = (
    "Engines register at the address in their KVGRPC_REGISTRY: is it this one, and do they run? A rank that registers "
    "nowhere tells of its own rooms: `kvgrpc rooms -s RANK`. The log of this registry ({registry}) says which left it."
)
NOBODY_KNOWS = (
    "Did the router log this number, and was the request sent to these engines? `kvgrpc rooms --fleet -s {registry}` "
    "lists what they know: open rooms, and at each rank the last 256 that went well and the last 256 that failed."
)


@click.command()
@click.argument("room", type=ROOM)
@ATTEMPT
@wide_option
@json_option
@calls_a_registry
def why(client: SyncClient, room: int, attempt: int, as_json: bool) -> None:
    """Find ROOM at the ranks of a registry, and tell what became of it at each of them, in order, with its cause."""
    told = look_at_room(client, room, attempt)
    if not told.sides:
        raise _nobody_knows(told, client.address)
    if as_json:
        return _show_json(told)
    show_table(f"Room {room}, attempt {attempt}", COLUMNS, rows_of(told), "none", FIRST_TO_GO)
    show_table("In order, each rank by its own host's clock", STEP_COLUMNS, step_rows(told), "none")
    first = first_failure(told)
    if first is not None:
        cause = [("at", first.incarnation), *failure_fields(first.room.failure)]
        show_record("Its cause, as the first rank saw it", cause)
        hint = f"{next_step(first.room)} docs/my-room-failed.md has more.".strip()
        click.secho(click.wrap_text(hint, width=columns_here()), fg="cyan")


def _nobody_knows(told: Story, registry: str) -> ToldWith:
    metadata = {"room": told.room, "attempt": told.attempt}
    if not told.asked:
        error = RoomNotFound(f"no rank is registered at {registry}, so none can tell of a room", metadata=metadata)
        return ToldWith(error, NO_RANKS.format(registry=registry))
    silent = [rank_name(each.row.rank) for each in told.silent[:_NAMED]]
    error = RoomNotFound(
        f"none of {counted(told.asked, 'rank')} at {registry} knows room {told.room} attempt {told.attempt}"
        + (f"; {len(told.silent)} did not answer: {', '.join(silent)}" if silent else ""),
        metadata=metadata,
    )
    return ToldWith(error, NOBODY_KNOWS.format(registry=registry))


def next_step(room: transfer_service_pb2.Room) -> str:
    """The advice about a room that failed; empty for a reason of a newer version."""
    reason = room.failure.reason
    return NEXT_STEPS.get(Reason(reason), "") if reason in Reason._value2member_map_ else ""


def rows_of(told: Story) -> Sequence[Sequence[object]]:
    """A row for each side, and for each rank that did not answer."""
    silent = [(row_name(each.row), role_name(each.row.role), unanswered(each)) for each in told.silent]
    return [*(with_short_names(_row(side), told.layouts) for side in told.sides), *silent]


def _row(side: RoomSide) -> Sequence[object]:
    _, _, state, peer, pages, writes, held, age, *stages, failure = room_row(side.room)
    return (side.rank, role_name(side.room.role), state, peer, pages, writes, held, age, *stages, failure)


def step_rows(told: Story) -> Sequence[Sequence[object]]:
    """When, how long after the first, which rank, what."""
    steps = list(steps_of(told.sides))
    return [(_time(at), f"+{milliseconds(at - steps[0][0])}", side.rank, what) for at, side, what in steps]


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, timezone.utc):%H:%M:%S.%f}"[:-3]


def first_failure(told: Story) -> RoomSide | None:
    """The earliest: each side keeps the cause that it heard of first."""
    failed = [side for side in told.sides if side.room.HasField("failure")]
    return min(failed, key=lambda side: (side.room.failure.time.ToNanoseconds(), side.rank), default=None)


def _show_json(told: Story) -> None:
    from google.protobuf import json_format

    for side in told.sides:
        fields = json_format.MessageToDict(side.room, always_print_fields_with_no_presence=True)
        print(json.dumps({"rank": str(side.rank), "room": fields}))
    for answer in told.silent:
        assert answer.error is not None
        print(json.dumps({"rank": rank_name(answer.row.rank), "error": answer.error.reason.name}))
