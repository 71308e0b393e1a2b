"""When a refused dial proves that the peer is dead and writes no more (rule 4, proof of death)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Container
from functools import partial

from kvgrpc.errors import TooManyRequests
from kvgrpc.model import RankRef
from kvgrpc.net import split
from kvgrpc.rpc.blocking import BlockingCalls
from kvgrpc.rpc.within import within

_PROBE_WITHIN_SECONDS = 1.0
# Names that are looked up at a time, each on a thread that a resolver may let hang for half a minute, and those that
# wait for one of the threads, a second at most.
MAX_LOOKUPS, MAX_WAITING = 8, 1_024
# Addresses and ports behind a name; empty: it is no name, or nobody knows what is behind it.
Resolved = frozenset[tuple[str, int]]
NOTHING: Resolved = frozenset()


class DeathProofs:
    """Remembers the addresses behind each peer's name at the time it welcomed us. Used on one event loop.

    A name may mean other addresses later; a refusal there says nothing about the peer, which may live on. ``prove``:
    False where a firewall or proxy may refuse in the peer's place: then only an answer with another epoch is proof.

    Names are looked up on threads of their own: where a resolver hangs, nothing else waits, and nothing is known.
    """

    def __init__(self, prove: bool = True) -> None:
        self._prove = prove
        self._welcomed: dict[RankRef, Resolved] = {}
        self._lookups = BlockingCalls("lookup", "lookups of names", threads=MAX_LOOKUPS, most=MAX_WAITING)

    def close(self) -> None:
        """Lets go of the threads."""
        self._lookups.close()

    async def behind(self, address: str) -> Resolved:
        """The addresses behind a name now; NOTHING for an IP address, and when the lookup takes too long."""
        return NOTHING if _is_number(address) else await self._resolve(address)

    def welcomed(self, ref: RankRef, resolved: Resolved) -> None:
        """``resolved``: what ``behind`` said before the dial."""
        if resolved:
            self._welcomed[ref] = resolved

    def forget_all_but(self, known: Container[RankRef]) -> None:
        for ref in [ref for ref in self._welcomed if ref not in known]:
            del self._welcomed[ref]

    async def is_proof(self, ref: RankRef, address: str, *, was_welcomed: bool) -> bool:
        """True if nobody listens at any address of that name, and it is the name's address of before.

        A peer that never welcomed us was never told where to write.
        """
        found = await self._resolve(address)
        if was_welcomed and (not self._prove or (not _is_number(address) and found != self._welcomed.get(ref))):
            return False
        answers = await asyncio.gather(*(_refuses_at(host, port) for host, port in found))
        return bool(answers) and all(answer is True for answer in answers)

    async def is_taken(self, address: str) -> bool:
        """True if a host takes connections there: a process lives that listens, whatever it does."""
        found = await self._resolve(address)
        return False in await asyncio.gather(*(_refuses_at(host, port) for host, port in found))

    async def _resolve(self, address: str) -> Resolved:
        host, port = split(address)
        if _is_number(address):
            return frozenset({(host, int(port or 0))})
        try:
            found = await within(_PROBE_WITHIN_SECONDS, self._lookups.run(partial(_look_up, host, int(port or 0))))
        # A RuntimeError: no thread is left, of the system's or, once this is closed, of these.
        except (OSError, ValueError, asyncio.TimeoutError, TooManyRequests, RuntimeError):
            return NOTHING
        return found


def _look_up(host: str, port: int) -> Resolved:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset((str(where[0]), int(where[1])) for *_, where in found)


async def _refuses_at(host: str, port: int) -> bool | None:
    """None: neither this nor that in time."""
    try:
        _, writer = await within(_PROBE_WITHIN_SECONDS, asyncio.open_connection(host, port))
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return None
    writer.close()
    return False


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(split(address)[0])
    except ValueError:
        return False
    return True
