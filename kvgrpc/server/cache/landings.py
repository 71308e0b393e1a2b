"""The places where a rank's pulls land: one for pages as its own, one more for each other way to divide them."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

from kvgrpc.errors import ServerDraining, TooManyRequests
from kvgrpc.observability.staging import forget_staging, watch_staging
from kvgrpc.pull.common import PageAxes
from kvgrpc.pull.model import Holder
from kvgrpc.pull.staging import CommonLanding, StagedMemory, StagedShares, Staging
from kvgrpc.pull.taking.landing import Landing
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.transfer.runtime.decode_manager import DecodeManager

_OPEN_SECONDS = 5.0
# Tensor-parallel sizes beside our own: each takes memory while the rank lives, and a row names its size itself.
MOST_SIZES = 4


class Landings:
    """``of`` and ``close_memory`` are for other threads, the rest belongs to the loop.

    Pages of another size have memory and sessions of their own: both sides of a session say how large its pages are.
    """

    def __init__(
        self,
        staging: Staging,
        take_memory: Callable[[Holder], StagedShares],
        receive: Callable[[StagedMemory, int], DecodeManager],
        loop: LoopThread,
        axes: PageAxes | None = None,
    ) -> None:
        """``take_memory``: for holders whose pages are divided as this one's; ``receive``: what receives in it at most
        so many pages; ``axes``: of our pages, where holders of another kind lend theirs in the common order."""
        self._staging, self._take_memory, self._receive = staging, take_memory, receive
        self._loop = loop
        self._taking = threading.Lock()
        # By tensor-parallel size, and whether pages come in the common order.
        self._of_size: dict[tuple[int, bool], Landing] = {}
        # Whoever was late to open a place finds its memory the next time.
        self._memory: dict[tuple[int, bool], StagedShares] = {}
        self._shares: list[StagedShares] = []
        self._draining = self._ended = False
        own = receive(staging, staging.landing.size)
        self._own = Landing(own, staging)
        # As large as our pages, so there is one memory and one side of sessions for both.
        self._common = self._own if axes is None else Landing(own, CommonLanding(staging, axes))
        self.managers = [own]

    @property
    def healthy(self) -> bool:
        return all(manager.healthy for manager in self.managers)

    def of(self, holder: Holder) -> Landing:
        """Raises KvGrpcError where there is no memory for its pages, or the cache is closing."""
        if not holder.tp_size:
            return self._common if holder.common else self._own
        size = holder.tp_size, holder.common
        if size not in self._of_size:
            self._open(size, holder)
        return self._of_size[size]

    def start(self) -> None:
        watch_staging(self._staging.use)
        self.managers[0].start()

    def drain(self) -> list[DecodeManager]:
        """Opens no other place from now on; returns those that receive, which are to be drained."""
        self._draining = True
        return [*self.managers]

    def undrain(self) -> None:
        self._draining = False
        for manager in self.managers:
            manager.undrain()

    async def stop(self) -> None:
        """Receives nothing more."""
        self._ended = True
        for manager in self.managers:
            await manager.stop()

    def close_memory(self, seconds: float) -> bool:
        """Copies nothing more; False where a copy still runs after ``seconds``."""
        return all([memory.close(seconds) for memory in (self._staging, *self._shares)])

    def forget(self) -> None:
        """The memory is freed."""
        for use in (self._staging.use, *(memory.use for memory in self._shares)):
            forget_staging(use)

    def _check_sizes(self, holder: Holder) -> None:
        if len(self._memory) >= MOST_SIZES:
            raise TooManyRequests(
                f"pages of {holder.engine} are of tensor-parallel size {holder.tp_size}, "
                f"and those of {MOST_SIZES} other sizes have the memory to land in",
                metadata={"limit": MOST_SIZES, "value": MOST_SIZES + 1, "scope": "tensor-parallel sizes"},
            )

    def _open(self, size: tuple[int, bool], holder: Holder) -> None:
        what = f"pages of {holder.engine}, of tensor-parallel size {holder.tp_size},"
        try:
            with self._taking:
                if size not in self._memory:
                    self._check_sizes(holder)
                    self._memory[size] = self._take_memory(holder)
            self._loop.run(self._start(size, self._memory[size]), _OPEN_SECONDS)
        except (MemoryError, OSError, ValueError) as error:
            most = self._staging.landing.size
            metadata = {"limit": most, "value": most, "scope": "landing pages"}
            raise TooManyRequests(f"{what} have no memory to land in: {error}", metadata=metadata) from error
        except (TimeoutError, concurrent.futures.TimeoutError, concurrent.futures.CancelledError) as error:
            raise ServerDraining(f"{what} are not received: the event loop is busy or has ended") from error

    async def _start(self, size: tuple[int, bool], memory: StagedShares) -> None:
        """In one turn of the loop: a drain before it leaves nothing that nobody closes, one after it finds all."""
        if size in self._of_size:  # of another thread that came with it
            return
        if self._ended or self._draining:
            raise ServerDraining("the cache is closing and takes nothing more")
        manager = self._receive(memory, memory.pool.pages)
        manager.start()
        watch_staging(memory.use)
        self.managers.append(manager)
        self._shares.append(memory)
        self._of_size[size] = Landing(manager, memory)
