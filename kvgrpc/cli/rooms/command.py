"""``kvgrpc sessions``, ``rooms``, ``room`` and ``cancel``: the hand-offs of one rank, prefill or decode."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from kvgrpc.cli.again import show_again, watch_option
from kvgrpc.cli.connection import calls_a_rank, json_option
from kvgrpc.cli.fitting import Name
from kvgrpc.cli.fleet.tables import fleet_option, look_at_fleet
from kvgrpc.cli.names import incarnation_name, peer_name, rank_name, reason_name, role_name, seconds_of, value_name
from kvgrpc.cli.output import gigabytes, milliseconds, seconds, show_json, show_record, show_table, size, wide_option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgrpc.client import SyncClient
    from kvgrpc.client.aio import Client
    from kvgrpc.v1 import common_pb2, transfer_service_pb2

STATES = ("bootstrapping", "waiting_for_input", "transferring", "success", "failed")
_LAST_MINUTE = ("#GB/s", "#p50", "#p99")
STAGES = ("#bootstrap", "#wait", "#transfer", "#GB/s")
SESSION_COLUMNS = ("peer", "state", "address", "#rooms", "#to tell", "#idle", "#ended well", "#failed", *_LAST_MINUTE)
ROOM_COLUMNS = ("#room", "#attempt", "state", "peer", "#pages done", "writes", "#held", "#age", *STAGES, "failure")
SESSIONS_FIRST_TO_GO = ("address", "#to tell", "#idle", "#rooms", "#ended well", "#p50", "#GB/s", "#failed", "#p99")
ROOMS_FIRST_TO_GO = ("#attempt", "writes", *STAGES[:3], "#GB/s", "#held", "#pages done", "#age", "peer")
_SLOWEST_FIRST_TO_GO = ("#attempt", "writes", "#held", "state", "failure", "#age", "#pages done", "peer", "#GB/s")
_HELD_FIRST_TO_GO = ("#attempt", *STAGES, "#pages done", "failure", "#age")
ROOM = click.IntRange(1, 2**63 - 1)
ATTEMPT = click.option("--attempt", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)


@click.command()
@fleet_option
@watch_option
@wide_option
@json_option
@calls_a_rank
def sessions(client: SyncClient, as_json: bool, fleet: bool, watch: bool) -> None:
    """List the sessions of a rank, its pairs with ranks of the other side, and what their last minute came to."""

    def look() -> Callable[[], None]:
        if fleet:
            return look_at_fleet(
                client,
                as_json,
                "Sessions",
                SESSION_COLUMNS,
                lambda rank: rank.list_sessions(),
                session_row,
                SESSIONS_FIRST_TO_GO,
            )
        found = client.list_sessions()
        if as_json:
            return partial(show_json, *found)
        rows = [session_row(session) for session in found]
        title = f"Sessions of {client.address}"
        return partial(show_table, title, SESSION_COLUMNS, rows, "none", SESSIONS_FIRST_TO_GO)

    show_again(watch, look)


@click.command()
@click.option("--state", "states", type=click.Choice(STATES), multiple=True, help="Only these; may be repeated.")
@click.option("--held", is_flag=True, help="Only those whose pages wait for evidence that nobody writes to them.")
@click.option("--slowest", is_flag=True, help="Only the last 256 that went well, the slowest first.")
@fleet_option
@watch_option
@wide_option
@json_option
@calls_a_rank
def rooms(
    client: SyncClient, states: tuple[str, ...], held: bool, slowest: bool, as_json: bool, fleet: bool, watch: bool
) -> None:
    """List the rooms (hand-offs) of a rank: the open ones, and the last that went well or failed."""
    from kvgrpc.v1 import transfer_service_pb2

    if slowest and (states or held):
        raise click.UsageError("--slowest lists rooms that went well: leave out --state and --held")
    first_to_go = _SLOWEST_FIRST_TO_GO if slowest else _HELD_FIRST_TO_GO if held else ROOMS_FIRST_TO_GO
    wanted = [transfer_service_pb2.RoomState.Value(f"ROOM_STATE_{state.upper()}") for state in states]

    async def listed(rank: Client) -> list[transfer_service_pb2.Room]:
        if slowest:
            return await rank.list_slowest_rooms()
        return await rank.list_rooms(states=wanted, held_only=held)

    def look() -> Callable[[], None]:
        if fleet:
            order = _fastest if slowest else None
            return look_at_fleet(client, as_json, "Rooms", ROOM_COLUMNS, listed, room_row, first_to_go, order)
        found = client.list_slowest_rooms() if slowest else client.list_rooms(states=wanted, held_only=held)
        if as_json:
            return partial(show_json, *found)
        rows = [room_row(room) for room in found]
        return partial(show_table, f"Rooms of {client.address}", ROOM_COLUMNS, rows, "none", first_to_go)

    show_again(watch, look)


def _fastest(room: transfer_service_pb2.Room) -> float:
    """Largest where a room took least."""
    end = room.end
    return -sum(map(seconds_of, (end.bootstrap_time, end.wait_time, end.transfer_time)))


@click.command()
@click.argument("room", type=ROOM)
@ATTEMPT
@json_option
@calls_a_rank
def room(client: SyncClient, room: int, attempt: int, as_json: bool) -> None:
    """Show one ROOM of a rank with its parts and its root cause."""
    found = client.get_room(room, attempt)
    show_json(found) if as_json else show_room(found)


@click.command()
@click.argument("room", type=ROOM)
@ATTEMPT
@click.option("--cause", default="cancelled with kvgrpc cancel", show_default=True, help="Said on both sides.")
@json_option
@calls_a_rank
def cancel(client: SyncClient, room: int, attempt: int, cause: str, as_json: bool) -> None:
    """Cancel one ROOM; the other side is told. One that has ended stays as it is."""
    found = client.cancel_room(room, attempt, cause)
    show_json(found) if as_json else show_room(found)


def session_row(session: transfer_service_pb2.Session) -> Sequence[object]:
    return (
        peer_name(session.peer),
        _state_of(session),
        session.address,
        session.rooms,
        session.pending_rooms,
        seconds(seconds_of(session.idle_time)),
        session.since_start.succeeded,
        session.since_start.failed,
        *_last_minute(session.last_minute),
    )


def _last_minute(figures: transfer_service_pb2.HandOffFigures) -> Sequence[object]:
    if not figures.succeeded:
        return ("", "", "")
    times = (milliseconds(seconds_of(time)) for time in (figures.p50, figures.p99))
    return (gigabytes(figures.gigabytes_per_second), *times)


def room_row(room: transfer_service_pb2.Room) -> Sequence[object]:
    return (
        room.room,
        room.attempt,
        state_name(room.state),
        peers_of(room),
        f"{pages_done(room)}/{room.pages or '?'}",
        " ".join(sorted({writes_name(part.writes) for part in room.parts})),
        room.held_pages or "",
        seconds(seconds_of(room.age)),
        *(stages_of(room.end) if room.HasField("end") else ("", "", "", "")),
        reason_name(room.failure) if room.HasField("failure") else "",
    )


def peers_of(room: transfer_service_pb2.Room) -> str:
    """The first, and how many more there are."""
    if not room.parts:
        return ""
    first = rank_name(room.parts[0].peer)
    peers = f"{first} +{len(room.parts) - 1}" if len(room.parts) > 1 else first
    return Name(peers, peers)


def stages_of(end: transfer_service_pb2.HandOffEnd) -> Sequence[str]:
    times = (end.bootstrap_time, end.wait_time, end.transfer_time)
    return (*(milliseconds(seconds_of(time)) for time in times), gigabytes(end.gigabytes_per_second))


def show_room(room: transfer_service_pb2.Room) -> None:
    fields: list[tuple[str, object]] = [
        ("state", state_name(room.state)),
        ("role here", role_name(room.role)),
        ("pages", room.pages or None),
        ("pages held", room.held_pages if room.held else None),
        ("handle open", room.local_handle),
        ("age", seconds(seconds_of(room.age))),
    ]
    if room.HasField("end"):
        said = ("until both sides were known", "until there were pages", "until all had moved", "GB/s")
        fields += [("ended", f"{room.end.time.ToDatetime():%Y-%m-%d %H:%M:%S} UTC"), ("bytes", size(room.end.bytes))]
        fields += zip(said, stages_of(room.end), strict=True)
    if room.traceparent:
        fields.append(("trace", room.traceparent))
    if room.HasField("failure"):
        fields += failure_fields(room.failure)
    show_record(f"Room {room.room}, attempt {room.attempt}", fields)
    columns = ("peer", "state", "writes", "#pages done")
    rows = [
        (rank_name(part.peer), state_name(part.state), writes_name(part.writes), part.pages_done) for part in room.parts
    ]
    show_table("Parts", columns, rows, "none known yet")


def failure_fields(failure: common_pb2.Failure) -> list[tuple[str, object]]:
    fields: list[tuple[str, object]] = [("failure", reason_name(failure)), ("why", failure.message)]
    if failure.HasField("origin"):
        fields.append(("seen first by", incarnation_name(failure.origin)))
    if failure.HasField("retry_after"):
        fields.append(("of use again after", seconds(seconds_of(failure.retry_after))))
    return fields + [(key, value) for key, value in sorted(failure.metadata.items())]


def pages_done(room: transfer_service_pb2.Room) -> int:
    """Returns what all parts have: a page is done when every part of it is."""
    return min((part.pages_done for part in room.parts), default=0)


def _state_of(session: transfer_service_pb2.Session) -> str:
    name = session_state_name(session.state)
    if not session.HasField("silent_since"):
        return name
    return f"{name} since {session.silent_since.ToDatetime():%H:%M:%S} UTC"


def session_state_name(state: transfer_service_pb2.SessionState.ValueType) -> str:
    from kvgrpc.v1 import transfer_service_pb2

    return value_name(transfer_service_pb2.SessionState, state)


def state_name(state: transfer_service_pb2.RoomState.ValueType) -> str:
    from kvgrpc.v1 import transfer_service_pb2

    return value_name(transfer_service_pb2.RoomState, state)


def writes_name(writes: transfer_service_pb2.Writes.ValueType) -> str:
    from kvgrpc.v1 import transfer_service_pb2

    return value_name(transfer_service_pb2.Writes, writes)
