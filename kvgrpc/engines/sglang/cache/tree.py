"""Orders done on SGLang's prefix tree, in its scheduler's thread and in the same step at every rank of a replica.

What this asks of the tree is what SGLang's own scheduler asks for its requests: ``match_prefix``,
``prefetch_from_storage``, ``check_prefetch_progress``, ``write_backup_storage`` and locks of host pages. The tree's
counts are those on which all ranks agreed, so what one rank tells holds for all.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvgrpc.engines.sglang.cache.orders import CacheOrder, OrderKind, Told
from kvgrpc.engines.sglang.cache.outcomes import BroughtPages
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.prefetch.model import OperationState, Stop
from kvgrpc.prefetch.protocol.operation import state_of

logger = logging.getLogger(__name__)

Tell = Callable[[Told], None]
# Of the host pool, for all pins together: what requests need must find room.
_PART_PINNED = 4


@dataclass(slots=True)
class _Fetching:
    """A prefetch of SGLang's that an order began. ``operation``: SGLang's own record of it."""

    order: CacheOrder
    handle: CacheRequestHandle
    operation: Any
    whole: int
    near: int
    threshold: int
    stop: Stop = Stop.NONE
    told: Told | None = None


@dataclass(slots=True)
class _Writing:
    """A backup of ``tokens`` of a prompt. ``spans``: by SGLang's operation, which tokens of the prompt it writes;
    ``left``: those that have not ended; ``written``: by operation, how many storage took."""

    tokens: int
    spans: dict[int, tuple[int, int]]
    left: set[int]
    written: dict[int, int] = field(default_factory=dict)

    @property
    def there(self) -> int:
        """Leading tokens of the prompt that storage took."""
        there = 0
        for number, (begin, end) in sorted(self.spans.items(), key=lambda each: each[1]):
            if begin == there:
                there += min(self.written.get(number, 0), end - begin)
        return there


@dataclass(slots=True)
class _Pin:
    node: Any
    receipt: Any
    tokens: int


class TreeOrders:
    """Of one scheduler process. ``tell`` hears what became of orders; it must not block. ``outcomes``: of the leading
    rank, which follows the pages further."""

    def __init__(self, tree: Any, tell: Tell, outcomes: BroughtPages | None = None) -> None:
        self._tree = tree
        self._tell = tell
        self._outcomes = outcomes
        self._fetching: dict[str, _Fetching] = {}
        self._writing: dict[str, _Writing] = {}
        # SGLang's operations that its backup thread has done since the last step, with the tokens that storage took.
        self._written: deque[tuple[int, int]] = deque()
        self._pins: dict[str, _Pin] = {}
        self._lines = RateLimited(logger)
        self._does: dict[OrderKind, Callable[[CacheOrder], None]] = {
            OrderKind.LOOK: self._look,
            OrderKind.PREFETCH: self._prefetch,
            OrderKind.BACKUP: self._back_up,
            OrderKind.CUT: self._cut,
            OrderKind.PIN: self._pin,
            OrderKind.UNPIN: self._unpin,
        }

    @property
    def pinned_tokens(self) -> int:
        return sum(pin.tokens for pin in self._pins.values())

    def do(self, order: CacheOrder) -> None:
        """Never raises: an error of ours would end the engine."""
        try:
            self._does[order.kind](order)
        except Exception as error:
            text = one_line(f"{order.kind.value}: {type(error).__name__}: {error}")
            self._lines.exception(order.kind.value, f"kvgrpc: SGLang's tree did not do what was asked: {text}")
            self._tell(Told(order.number, OperationState.FAILED, error=text))

    def look_after(self) -> None:
        """After each step in which the tree took what its storage threads had done."""
        for fetching in list(self._fetching.values()):
            try:
                self._tell_progress(fetching)
            except Exception as error:
                self._fetching.pop(fetching.order.number, None)
                text = one_line(f"{type(error).__name__}: {error}")
                self._lines.exception("follow", f"kvgrpc: SGLang's tree does not say what became of a prefetch: {text}")
                self._tell(Told(fetching.order.number, OperationState.FAILED, error=text))
        # Of an operation this is noted before its end is told. SGLang's own, of no order, are dropped.
        written = dict(self._written.popleft() for _ in range(len(self._written)))
        for number, writing in list(self._writing.items()):
            writing.written.update((each, written[each]) for each in writing.left & written.keys())
            writing.left &= self._tree.ongoing_backup.keys()
            if not writing.left:
                del self._writing[number]
                self._tell(_end_of_backup(number, writing))

    def note_written(self, operation: Any) -> None:
        """On SGLang's backup thread, which has written one of its operations, or could not, before it says so."""
        try:
            self._written.append((operation.id, _taken_by_storage(operation)))
        except Exception as error:  # it counts as one of which storage took nothing
            text = one_line(f"{type(error).__name__}: {error}")
            self._lines.exception("written", f"kvgrpc: SGLang does not say what storage took of a backup: {text}")

    def forget(self) -> None:
        """The tree was emptied: nothing of what is locked or moved is left."""
        self._pins.clear()
        ended = [*self._fetching, *self._writing]
        self._fetching.clear()
        self._writing.clear()
        for number in ended:
            self._tell(Told(number, OperationState.CANCELLED, Stop.SHUT_DOWN))
        if self._outcomes is not None:
            self._outcomes.forget()

    def _look(self, order: CacheOrder) -> None:
        match = self._match(order)
        if self._outcomes is not None and self._outcomes.found(order.number, match.last_host_node, _near(match)):
            return
        self._tell(Told(order.number, device=match.device_prefix_len, near=_near(match)))

    def _prefetch(self, order: CacheOrder) -> None:
        tree, tokens = self._tree, order.prompt
        match = self._match(order)
        near, whole = _near(match), self._whole(len(tokens))
        if near >= whole:
            return self._decline(order, Stop.COVERED, whole)
        anchor = match.last_host_node
        if not tree.enable_storage:
            return self._decline(order, Stop.BACKEND_DOWN, near)
        if not (tree.is_root(anchor) or tree.is_backuped(anchor)):
            # SGLang hangs what comes from storage below host pages alone, and writes them as its policy says.
            return self._decline(order, Stop.NOT_PRESENT, near)
        handle = CacheRequestHandle(f"kvgrpc-{order.number}", 0)
        prefix_keys = tree.get_prefix_hash_values(anchor) if tree.hicache_storage_pass_prefix_keys else None
        tree.prefetch_from_storage(
            handle,
            anchor,
            tokens[near:],
            tree.get_last_hash_value(anchor),
            prefix_keys,
            matched_prefix_tokens=tokens[:near],
            extra_key=order.extra_key,
            cache_salt=order.cache_salt,
        )
        begun = tree.ongoing_prefetch.get(handle)
        if begun is None:
            self._let_go(handle)
            short = whole - near < tree.prefetch_threshold
            return self._decline(order, Stop.TOO_SHORT if short else Stop.RATE_LIMITED, near)
        fetching = _Fetching(order, handle, begun.operation, whole, near, tree.prefetch_threshold)
        self._fetching[order.number] = fetching
        self._tell_progress(fetching)

    def _tell_progress(self, fetching: _Fetching) -> None:
        tree, operation, number = self._tree, fetching.operation, fetching.order.number
        begun = tree.ongoing_prefetch.get(fetching.handle)
        if begun is not None and begun.operation is operation:
            near = fetching.near
            if begun.host_indices is None:
                told = Told(number, OperationState.QUERYING, near=near, done=near)
            else:
                done = near + operation.completed_tokens
                told = Told(number, OperationState.TRANSFERRING, near=near, hit=operation.storage_hit_count, done=done)
            if told != fetching.told:
                fetching.told = told
                self._tell(told)
            return
        del self._fetching[number]
        landed = fetching.handle in tree.prefetch_loaded_tokens_by_reqid
        self._let_go(fetching.handle)
        self._tell(self._end_of(fetching, landed))

    def _end_of(self, fetching: _Fetching, landed: bool) -> Told:
        """SGLang has ended it: what of the prompt a request finds now, which is what counts."""
        number, hit, stop = fetching.order.number, fetching.operation.storage_hit_count, fetching.stop
        match = self._match(fetching.order)
        there = min(_near(match), fetching.whole)
        if landed and self._outcomes is not None:
            self._outcomes.follow(fetching.order, match.last_host_node, fetching.near, there)
        if stop is Stop.NONE and not landed:
            # It lets go of one that brought nothing: storage had too little, or the host no room.
            stop = Stop.BELOW_THRESHOLD if hit < fetching.threshold else Stop.CAPACITY
            return Told(number, OperationState.DECLINED, stop, near=fetching.near, hit=hit, done=there)
        state = OperationState.DONE
        if stop is Stop.DEADLINE:
            state = OperationState.EXPIRED
        elif stop is not Stop.NONE:
            state = OperationState.CANCELLED
        elif there < fetching.near + hit:
            stop = Stop.PAGE_LOST
            state = OperationState.PARTIAL if there > fetching.near else OperationState.FAILED
        return Told(number, state, stop, near=fetching.near, hit=hit, done=there)

    def _cut(self, order: CacheOrder) -> None:
        """Ends a prefetch as SGLang's time-out for a request does: what has arrived at every rank stays."""
        fetching = self._fetching.get(order.number)
        if fetching is None:
            if order.number not in self._writing:
                self._tell(Told(order.number, state_of(order.stop, 0), order.stop))
            return
        fetching.stop = order.stop
        fetching.operation.mark_terminate()
        self._tree.check_prefetch_progress(fetching.handle)
        self._tell_progress(fetching)

    def _back_up(self, order: CacheOrder) -> None:
        tree = self._tree
        if not tree.enable_storage:
            return self._decline(order, Stop.BACKEND_DOWN, 0)
        path = self._host_path(order)
        if not path:
            return self._decline(order, Stop.NOT_PRESENT, 0)
        before, begin, span_of = set(tree.ongoing_backup), 0, dict[Any, tuple[int, int]]()
        for step in path:
            tree.write_backup_storage(step.node_id)
            span_of[step.node_id] = begin, step.path_end
            begin = step.path_end
        begun = {number: span_of[node] for number, (node, _) in tree.ongoing_backup.items() if number not in before}
        writing = self._writing[order.number] = _Writing(begin, begun, set(begun))
        self._tell(Told(order.number, OperationState.TRANSFERRING, near=writing.tokens))

    def _pin(self, order: CacheOrder) -> None:
        """The host's copy of a prefix; a repeat under one number takes the place of what was pinned before."""
        self._release(order.number)
        path = self._host_path(order)
        most = self._tree.cache_controller.mem_pool_host.size // _PART_PINNED
        room = most - self.pinned_tokens
        path = [step for step in path if step.path_end <= room]
        tokens = path[-1].path_end if path else 0
        if path:
            node = path[-1].node_id
            receipt = self._tree.inc_host_lock_ref(node).to_dec_params()
            self._pins[order.number] = _Pin(node, receipt, tokens)
        self._tell(Told(order.number, done=tokens))

    def _unpin(self, order: CacheOrder) -> None:
        self._release(order.number)

    def _release(self, number: str) -> None:
        pin = self._pins.pop(number, None)
        if pin is not None:
            self._tree.dec_host_lock_ref(pin.node, pin.receipt)

    def _host_path(self, order: CacheOrder) -> list[Any]:
        """The nodes from the root on that the host has copies of, as far as the prompt goes."""
        anchor = self._match(order).last_host_node
        if self._tree.is_root(anchor):
            return []
        (path,) = self._tree.tree_core.collect_path_info([anchor])
        backed = [self._tree.is_backuped(step.node_id) for step in path]
        return list(path[: [*backed, False].index(False)])

    def _match(self, order: CacheOrder) -> Any:
        key = RadixKey(order.prompt, order.extra_key, cache_salt=order.cache_salt)
        return self._tree.match_prefix(MatchPrefixParams(key=key))

    def _whole(self, tokens: int) -> int:
        """Tokens of full pages; with EAGLE they are read as pairs, one less."""
        words = tokens - 1 if self._tree.tree_core.is_eagle else tokens
        return int(words // self._tree.page_size * self._tree.page_size)

    def _decline(self, order: CacheOrder, stop: Stop, near: int) -> None:
        self._tell(Told(order.number, OperationState.DECLINED, stop, near=near, done=near))

    def _let_go(self, handle: CacheRequestHandle) -> None:
        """Of what SGLang keeps for a request that is to come: retries, waits and counts."""
        self._tree.release_aborted_request(handle)


def _end_of_backup(number: str, writing: _Writing) -> Told:
    there, tokens = writing.there, writing.tokens
    if there == tokens:
        return Told(number, OperationState.DONE, near=tokens, done=tokens)
    error = f"storage took {there} of {tokens} tokens: the engine's log says why"
    return Told(number, state_of(Stop.PAGE_LOST, there), Stop.PAGE_LOST, near=tokens, done=there, error=error)


def _taken_by_storage(operation: Any) -> int:
    """Leading tokens of an operation of SGLang's; none where storage did not take all of a pool beside the KV cache:
    without it they are not read again."""
    hits = operation.pool_storage_result.extra_pool_hit_pages
    wanted = {each.name: len(each.keys or ()) for each in operation.pool_transfers or ()}
    is_whole = all(hits.get(name, pages) >= pages for name, pages in wanted.items())
    return int(operation.completed_tokens) if is_whole else 0


def _near(match: Any) -> int:
    return int(match.device_prefix_len + match.host_hit_length)
