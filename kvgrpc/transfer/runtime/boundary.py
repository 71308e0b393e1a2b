"""The interface between a session runtime and the rest of kvgrpc: what another implementation must provide.

It names values (rooms, pages, chunks, rows of tables) and no record of a core: what a runtime keeps of a room is behind
``EngineHandle.record``.

``PrefillManager`` and ``DecodeManager`` are the implementation in Python. What must hold behind the methods (order,
frames of many, writes by evidence) is docs/session.md; docs/architecture.md says it in five lines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from msgspec import Struct

from kvgrpc.dataplane.base import DataPlane
from kvgrpc.errors import Failure
from kvgrpc.model import RankRef
from kvgrpc.transfer.aux_rows import AuxRows
from kvgrpc.transfer.layout.pools import CopiedPages
from kvgrpc.transfer.layout.topology import Shape
from kvgrpc.transfer.protocol.types import Align, RoomKey
from kvgrpc.transfer.runtime.timed_handle import TimedHandle
from kvgrpc.transfer.tables import RoomRow, SessionRow
from kvgrpc.v1 import transfer_service_pb2 as pb


class Reader(Protocol):
    """Reads the next message of a stream; None at its end."""

    def __call__(self) -> Awaitable[pb.SessionRequest | None]: ...


class EngineHandle(TimedHandle, eq=False, gc=False):
    """The handle of a sender or a receiver. ``record``: what the runtime keeps with it, of a type of its own; nobody
    else looks. ``closed``: the engine has dropped it. The runtime ends ``record`` with the room: the garbage collector
    does not look at handles, of which there are thousands.
    """

    closed: bool = False
    record: Any = None


class RoomRequest(Struct, frozen=True, gc=False):
    """An engine's order to a receiver: the room, the registry of its prefill, the dp rank if the router chose one,
    and the trace context of the request. As the engine gave it: nothing of it was checked but the key.
    """

    key: RoomKey
    bootstrap_addr: str
    prefill_dp_rank: int | None
    traceparent: str


class SentPages(Struct, gc=False):
    """The pages of one ``send``, as the engine said them (``KVSender.send``). ``start``: the first page's position."""

    pages: CopiedPages
    start: int
    is_last: bool
    wait: Callable[[], None] | None


class Runtime(Protocol):
    """The runtime of one rank, prefill or decode. It updates the ``Handle`` that the engine's end of a room reads."""

    # Asked by senders and receivers, on engine threads. None blocks and none raises.

    @property
    def role(self) -> str: ...

    @property
    def ref(self) -> RankRef: ...

    @property
    def pool_names(self) -> tuple[str, ...]: ...

    @property
    def aux(self) -> AuxRows: ...

    @property
    def queue_full(self) -> bool:
        """True if the command queue is full, so that no call can be taken now."""

    def overflow(self, key: RoomKey) -> Failure:
        """The failure of a room whose call the full command queue could not take."""

    def refusal(self, key: RoomKey) -> Failure | None:
        """Why no handle can be made for a room now; None: one can."""

    def fail(self, handle: EngineHandle, failure: Failure) -> None:
        """The engine ends a room."""

    def give_way(self) -> None:
        """An engine polled an open room: the calling thread may lend its turn to the runtime's threads."""

    @property
    def on_change(self) -> Callable[[], None] | None:
        """The function that a room's handle calls when it changed; None: nobody asked for ``fileno``."""

    def fileno(self) -> int:
        """The descriptor that an engine's event loop watches."""

    # Tables and life, on the loop thread.

    @property
    def plane(self) -> DataPlane: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def healthy(self) -> bool: ...

    @property
    def held_pages(self) -> int: ...

    @property
    def held_pages_limit(self) -> int:
        """Past it a decode rank refuses rooms."""

    def open_rooms(self) -> int: ...

    async def rooms_by_state(self) -> Mapping[str, int]:
        """Returns how many rooms are in each state, those that are remembered after their end included."""

    def depths(self) -> Mapping[str, int]:
        """Returns how much waits, is on its way, or was refused, by the names in kvgrpc.observability.ranks.DEPTHS."""

    def sessions(self) -> Iterable[SessionRow]:
        """Of those that there are now, each made when it is asked for."""

    async def newest_failed(
        self, count: int, wanted: Callable[[RoomRow], bool] | None = None
    ) -> tuple[list[RoomRow], int]: ...

    async def slowest(
        self, count: int, wanted: Callable[[RoomRow], bool] | None = None
    ) -> tuple[list[RoomRow], int]: ...

    async def page_of_rooms(
        self, after: RoomKey, count: int, wanted: Callable[[RoomRow], bool] | None = None
    ) -> tuple[list[RoomRow], RoomKey | None, int]:
        """The first ``count`` rooms after ``after`` that are ``wanted``, behind which room the next page begins (None:
        there is none), and how many rooms there are in all."""

    def room(self, key: RoomKey) -> RoomRow | None: ...

    def cancel(self, key: RoomKey, failure: Failure) -> bool:
        """Fails the room; False when there is none."""

    def start(self) -> None: ...

    async def drain(self, grace: float) -> tuple[bool, int]:
        """Refuses new rooms and waits for open ones; (nothing is left, open rooms)."""

    def undrain(self) -> None:
        """Takes new rooms again. A drain that still waits was cancelled before; not after ``stop``."""

    async def stop(self) -> None: ...


class PrefillRuntime(Runtime, Protocol):
    """Senders give it rooms and pages, on engine threads; ``serve`` and ``locate`` are the servicer's."""

    def claim(self, key: RoomKey, handle: EngineHandle, decode: str) -> None:
        """``decode``: the engine whose decode the room is for; "": whichever names it."""

    def send(
        self, handle: EngineHandle, sent: SentPages, aux: bytes | None, expectation: tuple[int | None, Align] | None
    ) -> None:
        """Pages that are computed. The runtime checks them, and fails the room for what cannot be."""

    async def serve(
        self, read: Reader, write: Callable[[pb.SessionResponse], Awaitable[None]], caller: str = ""
    ) -> None:
        """One stream from Hello to Goodbye."""

    @property
    def has_unknown_writes(self) -> bool:
        """True if a failed write may still be running. Memory that it reads or writes must not be freed then."""

    def close_worker(self, deadline: float) -> bool:
        """Ends the transfer thread; False when a write is still running."""

    def on_plane_closed(self) -> None:
        """The data plane was closed: no write is left anywhere, also none whose outcome was unknown."""

    async def locate(self, keys: Sequence[RoomKey], timeout: float) -> list[RoomKey]:
        """Returns which of the rooms have a sender here."""


def prefill_of(runtime: Runtime) -> PrefillRuntime | None:
    """The runtime of a prefill rank; None for a decode rank's."""
    return cast(PrefillRuntime, runtime) if runtime.role == "prefill" else None


class DecodeRuntime(Runtime, Protocol):
    """Receivers give it rooms and pages, on engine threads."""

    def stands(self, request: RoomRequest) -> bool:
        """True if pages may be allocated at once."""

    def open(self, handle: EngineHandle, request: RoomRequest) -> None: ...

    def write(self, handle: EngineHandle, pages: CopiedPages, first_page: int, aux_index: int | None) -> None:
        """Says where the room goes. The runtime checks it, and fails the room for what cannot be."""
