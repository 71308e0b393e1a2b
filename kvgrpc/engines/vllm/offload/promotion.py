"""One prefetch in vLLM's offloading: what a look-up finds in another tier, vLLM promotes to host memory.

A step asks and never waits: it runs under vLLM's lock, on the scheduler's thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, TierFilter
from vllm.v1.kv_offload.tiering.base import ParentManager, TransferJob

from kvgrpc.engines.vllm.offload.windows import WindowChunks
from kvgrpc.errors import Failure, StorageFailed
from kvgrpc.prefetch.model import OperationState, Stop
from kvgrpc.prefetch.orders import EngineOrders
from kvgrpc.prefetch.protocol.operation import Operation, state_of

# Of all promotions together: a step of the engine waits for them.
LOOKUPS_OF_A_STEP = 512
NAMES_OF_A_STEP = 4096
# Of a context: of the host alone, so that nothing is promoted.
NEAR = TierFilter(())
_LOST = "a chunk that a tier had could not be brought, or was evicted at once; the tier's own log says more"
_EMPTIED = "vLLM emptied its host cache while the order ran; order again"


class _Known(enum.IntEnum):
    """Of one chunk: NOTHING; a tier was ASKED and answers in a later step; FOUND, so that it comes or is there."""

    NOTHING = 0
    ASKED = 1
    FOUND = 2


class Promotion:
    """``name``: vLLM's keys of page hashes; ``on_device``: how many leading ones of the keys that it is given need not
    come, because requests find them there first; ``room``: chunks that it may bring, by what others fill and pin now;
    ``is_full``: whether vLLM's host memory has no chunk that could be evicted; ``windows``: chunks of other layers,
    which come last.

    The leading chunks that the host has already are pinned until its end, because what is brought stands behind them:
    ``pinned`` are vLLM's jobs for them, to be reported as finished once the promotion has ended.
    """

    def __init__(
        self,
        operation: Operation,
        name: Callable[[Sequence[str]], Sequence[OffloadKey]],
        orders: EngineOrders,
        room: Callable[[Promotion], int],
        chunk_bytes: int,
        chunk_tokens: int,
        is_full: Callable[[], bool] = lambda: False,
        on_device: Callable[[Sequence[OffloadKey]], int] = lambda keys: 0,
        windows: WindowChunks | None = None,
    ) -> None:
        self.operation = operation
        self.pinned: list[TransferJob] = []
        self._name, self._chunk_tokens = name, chunk_tokens
        self._orders, self._room, self._chunk_bytes, self._is_full = orders, room, chunk_bytes, is_full
        self._context = ReqContext(req_id=f"kvgrpc-{operation.operation_id}")
        # Of the leading chunks, until all of them have one.
        self._keys: list[OffloadKey] = []
        self._known: list[_Known] = []
        # Leading chunks: that need not come; that are in the host now; that were found. Behind ``_end`` none is wanted.
        self._covered = self._there = self._found = 0
        self._end = len(operation.hashes)
        # Leading chunks that requests find on the device, as far as was looked; and that it is known which are covered.
        self._leading_on_device, self._on_device, self._begun = on_device, 0, False
        # In their order: those that it had to bring, and how many of them vLLM fills no more.
        self._moving: list[OffloadKey] = []
        self._moved = 0
        self._windows, self._reserved = windows, 0 if windows is None else windows.most
        # How many of those that came were told.
        self._followed = 0
        self._stop, self._why_lost = Stop.NONE, _LOST

    @property
    def held(self) -> int:
        """Chunks of the host that it fills or pins."""
        own = len(self._moving) - (0 if self._windows is None else len(self._windows.brought))
        return own + self._reserved + sum(len(each.keys) for each in self.pinned)

    def came(self) -> Sequence[OffloadKey]:
        """The chunks that it brought since it was asked last."""
        first, self._followed = max(self._covered, self._followed), self._there
        return self._keys[first : self._there]

    def begin(self, parent: ParentManager) -> None:
        parent.on_new_request(self._context)
        self._tell(OperationState.QUERYING)

    def step(self, parent: ParentManager, sharing: int = 1) -> bool:
        """True if it has ended. ``sharing``: promotions that share a step's work, this one among them."""
        looks = max(1, LOOKUPS_OF_A_STEP // sharing)
        stop = self._orders.stop_of(self.operation)
        if stop is not Stop.NONE and self._stop is Stop.NONE:
            self._stop, self._end = stop, self._found
        if self._end and not self._all_named(max(1, NAMES_OF_A_STEP // sharing)):
            return False
        if not self._begun:
            self._cover(parent, looks)
            if not self._begun:
                return False
        self._ask(parent, looks)
        self._count_in_host(parent, looks)
        came = self._there == self._end and self._windows_came(parent, looks, cut=stop is not Stop.NONE)
        if not came or self._still_moves(parent, looks):
            self._tell(OperationState.TRANSFERRING if self._moving else OperationState.QUERYING)
            return False
        parent.on_request_finished(self._context)
        self._finish()
        return True

    def lose(self) -> None:
        """vLLM empties its host: nothing of the prompt is there any more, and no more of it is brought."""
        self._stop, self._begun, self._why_lost = self._stop or Stop.PAGE_LOST, True, _EMPTIED
        self._covered = self._there = self._found = self._end = 0

    def abandon(self, parent: ParentManager) -> None:
        """After an error: vLLM forgets the request."""
        parent.on_request_finished(self._context)

    def _all_named(self, most: int) -> bool:
        """Names ``most`` more; True if all have their names, by which the tiers know the whole prompt, as of any
        request, before they are asked for a part of it."""
        first = len(self._keys)
        keys = self._name(self.operation.hashes[first : first + most])
        for number, key in enumerate(keys, start=first + 1):
            self._context.set_offload_key_position(key, number * self._chunk_tokens)
        self._keys += keys
        self._known += [_Known.NOTHING] * len(keys)
        return len(self._keys) == len(self.operation.hashes)

    def _cover(self, parent: ParentManager, looks: int) -> None:
        """Passes leading chunks that need not come, and pins those of them that the host has."""
        in_host = []
        last = min(self._end, self._covered + looks)
        if self._on_device == self._covered:
            self._on_device += self._leading_on_device(self._keys[self._covered : last])
        while self._covered < last:
            here = self._near(parent, self._keys[self._covered]) is LookupResult.HIT
            if not here and self._covered >= self._on_device:
                break
            if here:
                in_host.append(self._keys[self._covered])
            self._covered += 1
        self._there = self._found = self._covered
        self._begun = self._covered < last or self._covered == self._end
        if in_host and self._covered < self._end:
            if self._room(self) < 1:
                self._end, self._stop, self._begun = self._covered, Stop.RATE_LIMITED, True
                return
            self.pinned.append(parent.create_store_job(in_host, self._context))

    def _ask(self, parent: ParentManager, looks: int) -> None:
        """Slow tiers answer in a later step, all at once what one step asks for. Behind a chunk whose answer is late
        nothing is promoted: without it the others would be of no use."""
        left = looks
        for index in range(self._found, self._end):
            if index >= self._end or not left:
                break
            if self._known[index] is _Known.FOUND:
                continue
            if len(self._moving) >= self._room(self) - self._reserved:
                self._end, self._stop = index, Stop.CAPACITY if self._moving else Stop.RATE_LIMITED
                break
            left -= 1
            result = parent.lookup(self._keys[index], self._context)
            if result is LookupResult.MISS:
                self._end = index
                if self._stop is Stop.NONE and self._is_full():
                    self._stop = Stop.CAPACITY
            elif result is LookupResult.RETRY and self._known[index] is _Known.ASKED:
                break
            elif result is LookupResult.RETRY:
                self._known[index] = _Known.ASKED
            else:
                self._note_found(index, result)
        while self._found < self._end and self._known[self._found] is _Known.FOUND:
            self._found += 1

    def _note_found(self, index: int, result: LookupResult) -> None:
        self._known[index] = _Known.FOUND
        if result is LookupResult.HIT_PENDING:
            self._moving.append(self._keys[index])

    def _count_in_host(self, parent: ParentManager, looks: int) -> None:
        """Advances past the leading chunks that are in the host now; ends at one that is lost."""
        for _ in range(min(looks, self._found - self._there)):
            result = self._near(parent, self._keys[self._there])
            if result is LookupResult.HIT_PENDING:
                return
            if result is LookupResult.MISS:
                self._end = self._found = self._there
                self._stop = self._stop or Stop.PAGE_LOST
                return
            self._there += 1

    def _still_moves(self, parent: ParentManager, looks: int) -> bool:
        """True if vLLM may still fill a chunk for it."""
        for key in self._moving[self._moved : self._moved + looks]:
            if self._near(parent, key) is LookupResult.HIT_PENDING:
                return True
            self._moved += 1
        return self._moved < len(self._moving)

    def _windows_came(self, parent: ParentManager, looks: int, cut: bool) -> bool:
        """True if it is there for all leading chunks; those that lack it do not count. ``cut``: no more is brought."""
        if self._windows is None:
            return True
        look = self._near if cut else self._ask_for_window
        self._there, over = self._windows.step(self._there, partial(look, parent), looks)
        self._found = self._end = self._there
        self._covered = min(self._covered, self._there)
        return over

    def _ask_for_window(self, parent: ParentManager, key: OffloadKey, page: int) -> LookupResult:
        assert self._windows is not None
        self._context.set_offload_key_position(key, (page + 1) * self._chunk_tokens)
        result = parent.lookup(key, self._context)
        if result is LookupResult.HIT_PENDING and key not in self._windows.brought:
            self._windows.brought[key] = page
            self._moving.append(key)
        elif result is LookupResult.MISS and self._stop is Stop.NONE and self._is_full():
            self._stop = Stop.CAPACITY
        return result

    def _near(self, parent: ParentManager, key: OffloadKey, page: int = 0) -> LookupResult:
        self._context.load_tier_filter = NEAR
        try:
            return parent.lookup(key, self._context)
        finally:
            self._context.load_tier_filter = TierFilter.ALL

    @property
    def _of_windows(self) -> int:
        """Chunks of windows that it brought and that count."""
        return 0 if self._windows is None else self._windows.came(self._there)

    def _tell(self, state: OperationState) -> None:
        self._orders.tell(
            self.operation,
            state=state,
            covered=self._covered,
            hit=self._found - self._covered,
            agreed=self._found,
            completed=self._there,
            nbytes=(self._there - self._covered + self._of_windows) * self._chunk_bytes,
        )

    def _finish(self) -> None:
        self._tell(OperationState.ENDING)
        came, stop = self._there - self._covered + self._of_windows, self._stop
        if self._covered == len(self.operation.hashes) and not came:
            state, stop = OperationState.DECLINED, Stop.COVERED
        elif stop in (Stop.CAPACITY, Stop.RATE_LIMITED):
            state = OperationState.DONE if came else OperationState.DECLINED
        elif stop is not Stop.NONE:
            state = state_of(stop, self._there)
        elif came:
            state = OperationState.DONE
        else:
            state, stop = OperationState.DECLINED, Stop.BELOW_THRESHOLD
        failure = None
        if stop is Stop.PAGE_LOST:
            failure = Failure.of(StorageFailed(self._why_lost, metadata={"backend": "vLLM", "status": "FAILED"}))
        self._orders.end(self.operation, state, stop, failure)
