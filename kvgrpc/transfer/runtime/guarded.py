"""Turns what a foreign data plane, or an engine's ``wait``, raises or wrongly answers into an outcome.

Nowhere else: whoever uses a plane through this expects no exception of it. What happens before a submission is
REJECTED, because nothing was sent; from there on FAILED_UNKNOWN, because bytes may be on their way (7, writes).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvgrpc.dataplane.base import (
    BatchedConnections,
    Bounded,
    DataPlane,
    EndedTransfer,
    MemoryRange,
    Outcome,
    Peer,
    Result,
    TellsClosed,
    Transfer,
)
from kvgrpc.transfer.layout.plan import Plan
from kvgrpc.transfer.protocol.failures import in_words, raised

logger = logging.getLogger(__name__)
T = TypeVar("T")
_LONGEST_SLEEP = 0.1
_LONGEST_ANSWER = 200


def attempt(call: Callable[[], T]) -> T | Result:
    """Returns what the call returns; REJECTED where it raises. For what comes before a write."""
    try:
        return call()
    except Exception as error:
        logger.exception("a write could not begin")
        return Result(Outcome.REJECTED, raised(error))


class GuardedPlane:
    """A DataPlane of which no method raises. For the threads that may use it (see kvgrpc.dataplane.base).

    ``plane``: the one that is guarded; ``submitted``: descriptors since somebody took the count.
    """

    def __init__(self, plane: DataPlane) -> None:
        self.plane = plane
        self.submitted = 0
        # A plane that somebody else wrote may not have them yet.
        quick_bytes: object = getattr(plane, "quick_bytes", 0)
        self.quick_bytes = quick_bytes if isinstance(quick_bytes, int) else 0
        self.gathers_slices = getattr(plane, "gathers_slices", False) is True
        self._tells_connections = True
        self._unregistered: dict[int, int] = {}

    @property
    def closed(self) -> bool:
        """True if its owner closed it and no write is left; False where it does not say."""
        try:
            return isinstance(self.plane, TellsClosed) and self.plane.closed is True
        except Exception:
            logger.exception("the data plane does not say whether it is closed")
            return False

    # On the transfer thread, or whoever writes in its place.

    @property
    def poll_interval(self) -> float:
        """See DataPlane; within reason."""
        try:
            interval = float(self.plane.poll_interval)
        except Exception:
            logger.exception("the data plane does not say how long to sleep")
            return _LONGEST_SLEEP
        return interval if 0 <= interval <= _LONGEST_SLEEP else _LONGEST_SLEEP

    def attach(self, address: bytes) -> Peer | Result:
        """The peer, or why there is none."""
        try:
            peer = self.plane.attach(address)
        except Exception as error:  # an address that is not one, a peer that is gone
            return Result(Outcome.REJECTED, raised(error))
        return Result(Outcome.REJECTED, "the data plane attached nobody") if peer is None else peer

    def detach(self, peer: Peer) -> None:
        try:
            self.plane.detach(peer)
        except Exception:
            logger.exception("the data plane raised on detach")

    def submit(self, peer: Peer, plan: Plan) -> Transfer:
        self.submitted += len(plan.nbytes)
        try:
            return self.plane.submit(peer, plan.source, plan.destination, plan.nbytes)
        except Exception as error:
            logger.exception("the data plane raised on submit")
            return EndedTransfer(Result(Outcome.FAILED_UNKNOWN, raised(error)))

    def poll(self, transfer: Transfer) -> Result | None:
        """A transfer is over once this returned a Result, whatever it would say later."""
        try:
            result = transfer.poll()
            if result is None or (
                isinstance(result, Result)
                and isinstance(result.outcome, Outcome)
                and isinstance(result.detail, str)
                and result.nbytes >= 0
            ):
                return result
            detail = f"poll answered {in_words(result)[:_LONGEST_ANSWER]}"
            logger.error("the data plane's %s", detail)
        except Exception as error:
            logger.exception("the data plane raised on poll")
            detail = raised(error)
        return Result(Outcome.FAILED_UNKNOWN, detail)

    def stop(self, transfer: Transfer) -> None:
        try:
            transfer.stop()
        except Exception:
            logger.exception("the data plane raised on stop")

    def buffer(self, nbytes: int) -> int | None:
        """Address of registered memory of the plane, which stays until it is closed; None: there is none now. What it
        allocated and did not register is not allocated again."""
        try:
            address = self._unregistered.pop(nbytes, None) or self.plane.allocate(nbytes)
            self._unregistered[nbytes] = address
            self.plane.register([MemoryRange(address, nbytes)])
            del self._unregistered[nbytes]
        except Exception as error:
            logger.warning("no %d bytes of the data plane's memory: %s", nbytes, raised(error))
            return None
        return address

    # On the event loop.

    def in_flight(self) -> tuple[int, int]:
        """See Bounded; (0, 0) where the plane does not say."""
        try:
            writes, nbytes = self.plane.in_flight() if isinstance(self.plane, Bounded) else (0, 0)
        except Exception:
            logger.exception("the data plane does not say what is in flight")
            return 0, 0
        return writes, nbytes

    # On a thread of its own.

    def connections_from_each(self, addresses: Sequence[bytes]) -> Sequence[frozenset[str] | None]:
        """See DataPlane, of each of them, in one look where the plane can. None: it cannot tell now, and is asked
        again, so only the first of these is logged.
        """
        plane = self.plane
        try:
            if isinstance(plane, BatchedConnections):
                found = [frozenset(names) for names in plane.connections_from_each(addresses)]
                if len(found) != len(addresses):
                    raise ValueError(f"{len(found)} answers about {len(addresses)} peers")
            else:
                found = [frozenset(plane.connections_from(address)) for address in addresses]
        except Exception:
            if self._tells_connections:
                logger.exception("the data plane raised on connections_from: pages of dead peers stay held meanwhile")
            self._tells_connections = False
            return [None] * len(addresses)
        self._tells_connections = True
        return found

    def close(self, deadline: float) -> bool:
        """See DataPlane. False too where it does not say True: a write may be left."""
        try:
            return self.plane.close(deadline) is True
        except Exception:
            logger.exception("the data plane raised on close")
            return False
