"""The callers of one server, from what its parts count by them."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvgrpc.rpc.callers import NewsReader, Who
from kvgrpc.rpc.interceptors import Admission, OpenCalls
from kvgrpc.rpc.security import CallerRole
from kvgrpc.rpc.turns import in_pieces
from kvgrpc.v1 import server_service_pb2 as pb

MAX_PAGE_BYTES = 1 << 20
# Of one caller.
MAX_METHODS = MAX_READERS = 64
# Whoever asks for the next page later sees the callers of then.
_LISTED_SECONDS = 10.0


@dataclass(slots=True)
class CallerHere:
    """All that one caller has here from one host."""

    who: Who
    calls: OpenCalls = field(default_factory=OpenCalls)
    rows: int = 0
    readers: list[NewsReader] = field(default_factory=list)
    key: str = field(init=False)
    """By which callers are listed."""

    def __post_init__(self) -> None:
        self.key = "\0".join((self.who.name, self.who.host, self.who.role.value if self.who.role else ""))

    def to_pb(self) -> pb.Caller:
        methods = self.calls.by_path.most_common(MAX_METHODS)
        readers = sorted(self.readers, key=lambda reader: -1 if reader.behind is None else reader.behind, reverse=True)
        return pb.Caller(
            name=self.who.name,
            role=_role_to_pb(self.who.role),
            address=self.who.host,
            open_calls=self.calls.unary,
            open_streams=self.calls.streams,
            methods=(pb.OpenMethod(method=path, open=count) for path, count in methods),
            rows=self.rows,
            readers=map(_reader_to_pb, readers[:MAX_READERS]),
        )


class CallersHere:
    """The callers of one server, as they are when somebody asks. Lives on one event loop.

    ``readers``: of each service that is followed, who does; ``rows``: of its registry, by the name and the host of who
    registered them.
    """

    def __init__(
        self,
        admission: Admission,
        readers: Sequence[Callable[[], Iterable[NewsReader]]] = (),
        rows: Callable[[], Mapping[tuple[str, str], int]] = dict,
    ) -> None:
        self._admission = admission
        self._readers = readers
        self._rows = rows
        # As the last list saw them that began, and what will forget it: of many lists that begin only one is kept.
        self._listed: list[CallerHere] | None = None
        self._forgetting: asyncio.TimerHandle | None = None

    async def page(self, after: str, size: int, authenticates: bool) -> tuple[list[pb.Caller], str]:
        """At most ``size`` of them behind the key ``after``, at least one where there is one, and the key of the last;
        an empty key: no more are there. ``authenticates``: callers prove a role, so rows are ranks'.

        The first page looks at all callers, those behind it at what that one saw.
        """
        listed = self._listed
        if not after or listed is None:
            listed = self._keep_listed(await self._now(authenticates))
        first = bisect.bisect_right(listed, after, key=lambda caller: caller.key)
        page = await _first_fitting(listed[first : first + size])
        return page, listed[first + len(page) - 1].key if first + len(page) < len(listed) else ""

    async def _now(self, authenticates: bool) -> list[CallerHere]:
        """All of them, ordered by name, host and role; in pieces, and one that ended meanwhile is not among them."""
        found: dict[Who, CallerHere] = {}

        def of(calling: Who) -> CallerHere:
            if calling not in found:
                found[calling] = CallerHere(calling)
            return found[calling]

        def gathered() -> Iterator[None]:
            for calling, calls in list(self._admission.open_calls.items()):
                if calls.by_path:
                    of(calling).calls = calls.copy()
                yield
            for reader in (each for readers in self._readers for each in list(readers())):
                of(reader.who).readers.append(reader)
                yield
            for (name, host), rows in self._rows().items():
                of(Who(name, host, CallerRole.RANK if authenticates else None)).rows = rows
                yield

        await in_pieces(gathered())
        return sorted(found.values(), key=lambda caller: caller.key)

    def _keep_listed(self, listed: list[CallerHere]) -> list[CallerHere]:
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._listed = listed
        self._forgetting = asyncio.get_running_loop().call_later(_LISTED_SECONDS, self._forget)
        return listed

    def _forget(self) -> None:
        self._listed = None


async def _first_fitting(callers: Sequence[CallerHere]) -> list[pb.Caller]:
    """The first of them that one page takes, at least one."""

    def encoded() -> Iterator[pb.Caller]:
        left = MAX_PAGE_BYTES
        for caller in callers:
            message = caller.to_pb()
            left -= message.ByteSize()
            if left < 0 and caller is not callers[0]:
                return
            yield message

    return await in_pieces(encoded())


def _reader_to_pb(reader: NewsReader) -> pb.NewsReader:
    message = pb.NewsReader(method=reader.method, engine=reader.engine, dp=reader.dp, behind=reader.behind)
    message.start_time.FromNanoseconds(round(reader.since * 1e9))
    return message


def _role_to_pb(role: CallerRole | None) -> pb.CallerRole.ValueType:
    return pb.CALLER_ROLE_UNSPECIFIED if role is None else pb.CallerRole.Value(f"CALLER_ROLE_{role.name}")
