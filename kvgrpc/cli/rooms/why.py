"""``kvgrpc why``: the story of one room, wherever in the fleet it is known."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from kvgrpc.cli.connection import calls_a_registry, json_option
from kvgrpc.cli.fleet.tables import unanswered
from kvgrpc.cli.names import incarnation_name, rank_name, role_name
from kvgrpc.cli.output import show_record, show_table
from kvgrpc.cli.rooms.command import ATTEMPT, ROOM, failure_fields, room_row
from kvgrpc.errors import Reason, RoomNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgrpc.client import SyncClient
    from kvgrpc.client.aio import Client
    from kvgrpc.client.fleet import RankAnswer
    from kvgrpc.v1 import transfer_service_pb2

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


@click.command()
@click.argument("room", type=ROOM)
@ATTEMPT
@json_option
@calls_a_registry
def why(client: SyncClient, room: int, attempt: int, as_json: bool) -> None:
    """Find ROOM at the ranks of a registry, and tell what became of it at each of them, with its cause."""

    async def look(rank: Client) -> transfer_service_pb2.Room | None:
        try:
            return await rank.get_room(room, attempt)
        except RoomNotFound:
            return None

    answers = client.ask_ranks(look)
    found = [answer for answer in answers if answer.value is not None]
    silent = [answer for answer in answers if answer.error is not None]
    if not found:
        raise RoomNotFound(
            f"none of {len(answers)} ranks at {client.address} knows room {room} attempt {attempt}"
            + (f"; {len(silent)} did not answer: {', '.join(_names(silent))}" if silent else ""),
            metadata={"room": room, "attempt": attempt},
        )
    if as_json:
        return _show_json(found, silent)
    columns = ("rank", "role", "state", "#pages done", "writes", "held", "#age", "failure")
    rows: list[Sequence[object]] = [_row(answer) for answer in found]
    rows += [(rank_name(each.row.rank), role_name(each.row.role), *unanswered(each, 6)) for each in silent]
    show_table(f"Room {room}, attempt {attempt}", columns, rows, "none")
    first = _first_failure(found)
    if first is not None:
        show_record("Its cause, as the first rank saw it", [("at", first[0]), *failure_fields(first[1].failure)])
        click.secho(f"{next_step(first[1])} docs/my-room-failed.md has more.".strip(), fg="cyan")


def next_step(room: transfer_service_pb2.Room) -> str:
    """What to do about a room that failed; empty for a reason of a newer version."""
    reason = room.failure.reason
    return NEXT_STEPS.get(Reason(reason), "") if reason in Reason._value2member_map_ else ""


def _row(answer: RankAnswer[transfer_service_pb2.Room | None]) -> Sequence[object]:
    room = answer.value
    assert room is not None
    _, _, *cells = room_row(room)
    return (rank_name(answer.row.rank), role_name(room.role), *cells)


def _first_failure(
    found: Sequence[RankAnswer[transfer_service_pb2.Room | None]],
) -> tuple[str, transfer_service_pb2.Room] | None:
    """The earliest: each side keeps the cause that it heard of first."""
    failed = [
        (answer.value.failure.time.ToNanoseconds(), incarnation_name(answer.row.rank), answer.value)
        for answer in found
        if answer.value is not None and answer.value.HasField("failure")
    ]
    return min(failed, key=lambda each: each[:2])[1:] if failed else None


def _names(answers: Sequence[RankAnswer[transfer_service_pb2.Room | None]]) -> list[str]:
    return [rank_name(answer.row.rank) for answer in answers[:5]]


def _show_json(
    found: Sequence[RankAnswer[transfer_service_pb2.Room | None]],
    silent: Sequence[RankAnswer[transfer_service_pb2.Room | None]],
) -> None:
    from google.protobuf import json_format

    for answer in found:
        assert answer.value is not None
        fields = json_format.MessageToDict(answer.value, always_print_fields_with_no_presence=True)
        print(json.dumps({"rank": rank_name(answer.row.rank), "room": fields}))
    for answer in silent:
        assert answer.error is not None
        print(json.dumps({"rank": rank_name(answer.row.rank), "error": answer.error.reason.name}))
