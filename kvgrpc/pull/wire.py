"""pull_service.proto <-> values, and nothing else. Decoders raise InvalidRequest, encoders never fail."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.storage.keys import PageIdentity
from kvgrpc.pull.common import is_common
from kvgrpc.pull.model import Lent, PullRow
from kvgrpc.transfer.protocol.types import MAX_ROOM
from kvgrpc.v1 import pull_service_pb2 as pb
from kvgrpc.wire import failure_to_pb, layout_from_pb, layout_to_pb, rank_ref_from_pb, rank_ref_to_pb

MAX_PAGES = 65_536
NAME_BYTES = 32
_HASH_BYTES = 32
_SHOWN_CHARS = 200
# Field of the message -> field of PageIdentity; the others of that have no part in a prefix cache. Layout comes last:
# another size makes it another one too.
_IDENTITY = {
    **{name: name for name in ("model", "revision", "dtype")},
    "page_tokens": "page_size",
    **{name: name for name in ("tp_size", "tp_rank", "pp_size", "pp_rank", "cp_size", "cp_rank", "layout")},
}
# Where the tp ranks hold the same bytes, which of them asks does not matter.
_OF_HEADS = ("tp_rank", "tp_size")


def identity_to_pb(identity: PageIdentity) -> pb.PageIdentity:
    return pb.PageIdentity(**{field: getattr(identity, name) for field, name in _IDENTITY.items()})


def check_identity(message: pb.PageIdentity, own: PageIdentity) -> None:
    """Raises InvalidRequest that names the first field in which pages differ from this cache's."""
    for field, name in _IDENTITY.items():
        theirs, ours = getattr(message, field), getattr(own, name)
        if theirs != ours and not (own.replicated and field in _OF_HEADS):
            value = theirs[:_SHOWN_CHARS] if isinstance(theirs, str) else theirs
            raise InvalidRequest.of(f"identity.{field}", value, f"{ours!r}, as this cache's pages have")


def asked_as_common(message: pb.PageIdentity, own: PageIdentity, common: PageIdentity | None) -> bool:
    """True if this names our pages as ``common``, False if as ``own``. Raises InvalidRequest that names the first field
    in which it is neither."""
    asked = common is not None and is_common(message.layout)
    check_identity(message, common if asked and common is not None else own)
    return asked


def hashes_from_pb(hashes: Sequence[bytes]) -> list[str]:
    if not 1 <= len(hashes) <= MAX_PAGES:
        raise InvalidRequest.of("page_hashes", f"{len(hashes)} hashes", f"1 to {MAX_PAGES}")
    wrong = next((n for n, each in enumerate(hashes) if len(each) != _HASH_BYTES), None)
    if wrong is not None:
        raise InvalidRequest.of(f"page_hashes[{wrong}]", f"{len(hashes[wrong])} bytes", f"{_HASH_BYTES} bytes")
    return [each.hex() for each in hashes]


def hashes_to_pb(hashes: Iterable[str]) -> list[bytes]:
    return [bytes.fromhex(each) for each in hashes]


def check_name(field: str, name: bytes) -> None:
    if len(name) not in (0, NAME_BYTES):
        raise InvalidRequest.of(field, f"{len(name)} bytes", f"{NAME_BYTES} bytes, or none")


def check_lend(request: pb.LendPagesRequest) -> None:
    if not 0 < request.room <= MAX_ROOM:
        raise InvalidRequest.of("room", request.room, "1 to 2^63-1, chosen at random")
    check_name("counted_prompt", request.counted_prompt)
    if request.counted_prompt:
        if not 1 <= request.pages <= MAX_PAGES or request.first_page + request.pages > MAX_PAGES:
            raise InvalidRequest.of("pages", request.pages, f"1 or more, with first_page at most {MAX_PAGES}")
    elif request.first_page >= len(request.page_hashes):
        rule = f"below {len(request.page_hashes)}, the number of page_hashes"
        raise InvalidRequest.of("first_page", request.first_page, rule)


def lent_from_pb(message: pb.LendPagesResponse, asked: int) -> Lent:
    """Raises InvalidRequest where a holder says that it lent more than was asked for."""
    if message.lent_pages > asked:
        raise InvalidRequest.of("lent_pages", message.lent_pages, f"at most {asked}, as asked for")
    return Lent(message.lent_pages, rank_ref_from_pb(message.holder), layout_from_pb(message.layout))


def lent_to_pb(lent: Lent) -> pb.LendPagesResponse:
    return pb.LendPagesResponse(
        lent_pages=lent.pages, holder=rank_ref_to_pb(lent.holder), layout=layout_to_pb(lent.layout)
    )


def row_to_pb(row: PullRow) -> pb.Pull:
    message = pb.Pull(
        room=row.room,
        direction=pb.PullDirection.ValueType(row.direction),
        peer=rank_ref_to_pb(row.peer),
        address=row.address,
        asked_pages=row.asked,
        lent_pages=row.lent,
        done_pages=row.done,
        bytes=row.nbytes,
        ended=row.ended,
    )
    message.start_time.FromMicroseconds(round(row.began_at * 1e6))
    message.took.FromMicroseconds(round(row.took_seconds * 1e6))
    if row.failure is not None:
        message.failure.CopyFrom(failure_to_pb(row.failure))
    return message
