"""The callers of one server, from what its parts count by them."""

from __future__ import annotations

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


@dataclass(slots=True)
class CallerHere:
    """All that one caller has here from one host."""

    who: Who
    calls: OpenCalls = field(default_factory=OpenCalls)
    rows: int = 0
    readers: list[NewsReader] = field(default_factory=list)

    @property
    def key(self) -> str:
        """By which callers are listed."""
        return "\0".join((self.who.name, self.who.host, self.who.role.value if self.who.role else ""))

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
    """Who calls one server, as it is when somebody asks. Lives on one event loop.

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

    def now(self, authenticates: bool) -> list[CallerHere]:
        """All of them, ordered by name, host and role. ``authenticates``: callers prove a role, so rows are ranks'."""
        found = {calling: CallerHere(calling, calls) for calling, calls in self._admission.open_calls.items()}

        def of(calling: Who) -> CallerHere:
            if calling not in found:
                found[calling] = CallerHere(calling)
            return found[calling]

        for reader in (each for readers in self._readers for each in readers()):
            of(reader.who).readers.append(reader)
        for (name, host), rows in self._rows().items():
            of(Who(name, host, CallerRole.RANK if authenticates else None)).rows = rows
        return sorted(found.values(), key=lambda caller: caller.key)


async def first_fitting(callers: Sequence[CallerHere]) -> list[pb.Caller]:
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
