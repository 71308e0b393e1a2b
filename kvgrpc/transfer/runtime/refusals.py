"""When a refused dial proves that the peer is dead and writes no more (rule 4, proof of death)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Container

from kvgrpc.model import RankRef
from kvgrpc.net import split
from kvgrpc.rpc.within import within

_PROBE_WITHIN_SECONDS = 1.0
# Addresses and ports behind a name; empty: it is no name, or nobody knows what is behind it.
Resolved = frozenset[tuple[str, int]]
NOTHING: Resolved = frozenset()


class Refusals:
    """Remembers the addresses behind each peer's name at the time it welcomed us. Used on one event loop.

    A name may mean other addresses later; a refusal there says nothing about the peer, which may live on. ``prove``:
    False where a firewall or proxy may refuse in the peer's place: then only an answer with another epoch is proof.
    """

    def __init__(self, prove: bool = True) -> None:
        self._prove = prove
        self._welcomed: dict[RankRef, Resolved] = {}

    def welcomed(self, ref: RankRef, resolved: Resolved) -> None:
        """``resolved``: what ``behind`` said before the dial."""
        if resolved:
            self._welcomed[ref] = resolved

    def forget_all_but(self, known: Container[RankRef]) -> None:
        for ref in [ref for ref in self._welcomed if ref not in known]:
            del self._welcomed[ref]

    async def is_proof(self, ref: RankRef, address: str, *, was_welcomed: bool) -> bool:
        """Whether nobody listens at any address of that name, and it is the name's address of before.

        A peer that never welcomed us was never told where to write.
        """
        found = await _resolve(address)
        if was_welcomed and (not self._prove or (not _is_number(address) and found != self._welcomed.get(ref))):
            return False
        answers = await asyncio.gather(*(_refuses_at(host, port) for host, port in found))
        return bool(answers) and all(answers)


async def behind(address: str) -> Resolved:
    """The addresses behind a name now; NOTHING for an IP address, and when the lookup takes too long."""
    return NOTHING if _is_number(address) else await _resolve(address)


async def _resolve(address: str) -> Resolved:
    host, port = split(address)
    asking = asyncio.get_running_loop().getaddrinfo(host, int(port or 0), type=socket.SOCK_STREAM)
    try:
        found = await within(_PROBE_WITHIN_SECONDS, asking)
    except (OSError, ValueError, asyncio.TimeoutError):
        return NOTHING
    return frozenset((str(where[0]), int(where[1])) for *_, where in found)


async def _refuses_at(host: str, port: int) -> bool:
    try:
        _, writer = await within(_PROBE_WITHIN_SECONDS, asyncio.open_connection(host, port))
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return False


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(split(address)[0])
    except ValueError:
        return False
    return True
