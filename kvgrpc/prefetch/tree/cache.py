"""The whole hierarchical cache for an engine without a radix cache of its own: a prefix tree over device and host, the
copies between them, and a controller that brings pages from storage.

It is the caller of every eviction: pools never make room by themselves. It counts the hits that write policies ask for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import eq
from typing import TYPE_CHECKING, Protocol

from kvgrpc.errors import FeatureDisabled, InvalidRequest, TooManyRequests
from kvgrpc.model import Tier
from kvgrpc.observability.logging import RateLimited
from kvgrpc.prefetch.model import NotEnoughPages, TierUse, WritePolicy
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages, PageState, as_pages
from kvgrpc.prefetch.tree.loads import LoadedPages, PinnedPrefix, filled_in, last_nodes
from kvgrpc.prefetch.tree.looks import NODES_AT_ONCE, each_node, may_purge
from kvgrpc.prefetch.tree.prefix_tree import Node, PrefixTree

if TYPE_CHECKING:
    from kvgrpc.prefetch.copies.copy_operation import CopyAck
    from kvgrpc.prefetch.copies.engine import CopyEngine
    from kvgrpc.prefetch.copies.layers import LayerSignal

_log = logging.getLogger(__name__)
# tier, hashes that came ("stored") or went ("removed"), in order, and the hash before the first.
CacheListener = Callable[[Tier, str, Sequence[str], str], None]
_HITS = {WritePolicy.WRITE_THROUGH: 1, WritePolicy.WRITE_THROUGH_SELECTIVE: 2}


class StorageWriter(Protocol):
    """The part of a controller that a cache asks."""

    @property
    def storage(self) -> object | None: ...

    def write_storage(self, hashes: Sequence[str], pages: Pages, *, tenant: str, extra_key: str) -> object:
        """Writes as ``CacheController.write_storage`` does."""


class TieredCache:
    """Thread-safe; nothing waits. ``copies`` None: there is no device tier here, only host and storage.

    ``write_hits``: uses of a prefix after which a selective write-through copies it; by default the policy's own.
    ``backup``: what reaches the host by a write is backed up to storage.
    """

    def __init__(
        self,
        host: HostPool,
        copies: CopyEngine | None = None,
        *,
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH_SELECTIVE,
        write_hits: int | None = None,
        backup: bool = True,
        listener: CacheListener | None = None,
    ) -> None:
        self.host = host
        self.copies = copies
        self.write_policy = write_policy
        self._write_hits = _HITS.get(write_policy, 0) if write_hits is None else write_hits
        self._backup = backup
        self._listener = listener
        self._writer: StorageWriter | None = None
        self._tree = PrefixTree()
        self._loads = LoadedPages()
        self._lock = threading.RLock()
        self._lines = RateLimited(_log)
        self._counts = {name: 0 for name in ("device_hits", "host_hits", "misses", "evicted_device", "evicted_host")}

    def attach(self, writer: StorageWriter) -> None:
        """Takes the controller whose keeper this is: it writes to storage what reaches the host."""
        self._writer = writer

    # For the engine's scheduler.

    def match(self, hashes: Sequence[str]) -> PinnedPrefix:
        """The longest prefix on device and host, kept until ``release``; counts as a use."""
        with self._lock:
            found = self._tree.match(hashes)
            self._tree.lock(found.last)
            self._counts["device_hits"] += len(found.device)
            self._counts["host_hits"] += len(found.host)
            self._counts["misses"] += len(hashes) - found.pages
            self._write_through(found.nodes)
            return PinnedPrefix(found.device, found.host, found.last)

    def release(self, held: PinnedPrefix) -> None:
        """Its pages may be evicted again. Once for each ``match``: raises InvalidRequest."""
        with self._lock:
            held.check_open()
            held.released = True
            self._tree.unlock(held.node)
            self._free_loads(held)

    def take_device(self, count: int) -> Pages | NotEnoughPages:
        """So many device pages for the engine to compute into, RESERVED; evicts what is worth least, or nothing where
        that would not be enough. Its ``missing`` is a lower bound where pins block eviction.

        With ``WritePolicy.WRITE_BACK`` what goes is copied to the host first, and ``NotEnoughPages`` says to ask again
        when that is done. The engine gives them back with ``insert`` or to ``copies.device.table``.
        """
        copies = self._copies()
        with self._lock:
            pages = copies.device.table.take(count)
            if isinstance(pages, NotEnoughPages):
                victims = self._device_victims(pages.missing)
                if isinstance(victims, NotEnoughPages):
                    return victims
                self._drop_from_device(victims)
                pages = copies.device.table.take(count)
            if not isinstance(pages, NotEnoughPages):
                self._loads.drop(pages.tolist())  # those of a load that failed are free before its ack comes here
            return pages

    def insert(
        self, hashes: Sequence[str], device_pages: Sequence[int], *, extra_key: str = "", priority: int = 0
    ) -> None:
        """The engine computed ``device_pages[i]`` as ``hashes[i]``, from the prompt's first page on: they are the
        cache's.

        Pages that were cached already under another number are freed, those of a load with its ``release``. Cached
        pages of a ``match`` are passed again, and so are those of a ``load`` whose signal was waited on to the last
        layer, be its ack there or not; those of a load that is still to bring a layer are refused (InvalidRequest).
        ``extra_key``: the one that the hashes began with; it is part of the keys under which storage gets the pages.
        """
        copies = self._copies()
        if len(hashes) != len(device_pages):
            raise InvalidRequest.of("pages", f"{len(device_pages)} pages for {len(hashes)} hashes", "as many as hashes")
        with self._lock:
            table = copies.device.table
            pages = as_pages(device_pages)
            if copies.awaited(pages):
                raise InvalidRequest.of("device_pages", "pages of a load that is on its way", "pages whose bytes came")
            fresh = table.commit_reserved(pages)
            spare = set(self._tree.insert_device(hashes, pages.tolist(), extra_key=extra_key, priority=priority))
            table.release(as_pages([page for page in fresh.tolist() if page in spare and page not in self._loads]))
            self._loads.drop(set(pages.tolist()) - spare)
            self._tell(Tier.DEVICE, "stored", hashes, "")
            if self.write_policy is WritePolicy.WRITE_THROUGH:
                self._write_through(self._tree.match(hashes, touch=False).nodes, used=1)

    def load(self, held: PinnedPrefix, *, priority: int = 0) -> Pages | NotEnoughPages:
        """Queues the host part of a match for the device; the device pages of all of it, those included that came there
        since the match. ``start_loading`` begins, its ack ends it. The pages stay until ``release``."""
        with self._lock:
            held.check_open()
            nodes = last_nodes(held.node, len(held.host))
            host = as_pages([page for node in nodes if node.device is None for page in node.host or ()])
            device = self.take_device(len(host))
            if isinstance(device, NotEnoughPages):
                return device
            if len(host):
                self._begin_load(held, host, device, priority)
            return filled_in(nodes, device)

    def start_loading(self) -> LayerSignal | None:
        """Begins all queued loads; what a forward pass waits on layer by layer."""
        return self._copies().start_loading()

    def write_back(self, hashes: Sequence[str]) -> int:
        """Copies what the device has of a prefix and the host has not; how many pages were begun."""
        with self._lock:
            return sum(len(node) for node in self._tree.match(hashes).nodes if self._write(node))

    def evict_device(self, count: int) -> int:
        """Frees about so many device pages of what is worth least; how many."""
        with self._lock:
            return self._drop_from_device(self._tree.device_victims(count, time.monotonic()))

    def evict_host(self, count: int) -> int:
        """Frees about so many host pages of what is worth least; how many."""
        with self._lock:
            return sum(map(self._drop_host, self._tree.host_victims(count, time.monotonic(), self._unread)))

    def pin(self, hashes: Sequence[str], seconds: float) -> int:
        """Keeps what device and host have of a prefix for so long; how many pages. 0 seconds end it. Raises
        InvalidRequest for NaN."""
        if math.isnan(seconds):
            raise InvalidRequest.of("seconds", seconds, "a number of seconds")
        with self._lock:
            return self._tree.pin(hashes, time.monotonic() + seconds if seconds > 0 else 0.0)

    def purge(self, tier: Tier, extra_key: str | None = None, *, dry_run: bool = False) -> tuple[list[str], int]:
        """Drops every page of device or host that is not in use, of one extra key or of all; (hashes, pages that
        stay). The engine's calls come between: it is done a few nodes at a time."""
        device, now = tier is Tier.DEVICE, time.monotonic()
        hashes: list[str] = []
        spared: Counter[Node] = Counter()  # children that a dry run would have dropped
        nodes = each_node(self._tree.root, self._lock, lambda node: [node])[::-1]
        listed = set(nodes)
        for first in range(0, len(nodes), NODES_AT_ONCE):
            with self._lock:
                for node in nodes[first : first + NODES_AT_ONCE]:
                    parent = node.parent
                    while parent is not None and may_purge(node, tier, extra_key, spared, now):
                        if not (device or self._unread(node)):
                            break
                        hashes.extend(node.hashes)
                        if dry_run:
                            spared[parent] += 1
                        else:
                            self._drop_device(node) if device else self._drop_host(node)
                        # A node that was split meanwhile has a front that was not listed.
                        if parent in listed:
                            break
                        node, parent = parent, parent.parent
        with self._lock:
            left = self._tree.device_pages(extra_key) if device else self._tree.host_pages(extra_key)
        return hashes, left - len(hashes) if dry_run else left

    def clear(self) -> None:
        """Gives every page back, whoever holds it; once nothing copies any more."""
        with self._lock:
            for node in list(self._tree.nodes()):
                if node.device is not None:
                    self._copies().device.table.release(as_pages(node.device))
                if node.host is not None:
                    self.host.table.release(as_pages(node.host))
                # Whoever holds it may release it yet: that must find nothing.
                node.parent = node.device = node.host = None
            loaded = self._loads.take_all()
            if len(loaded):
                self._copies().device.table.release(loaded)
            self._tree = PrefixTree()

    # For operators and the service.

    def leading(self, hashes: Sequence[str]) -> int:
        with self._lock:
            return self._tree.leading(hashes)[1]

    def leading_by_tier(self, hashes: Sequence[str]) -> tuple[int, int]:
        """(pages on the device, pages on device or host) from the front."""
        with self._lock:
            return self._tree.leading(hashes)

    def hashes(self, tier: Tier, extra_key: str | None = None) -> list[str]:
        """All pages of a tier, each behind the pages before it."""

        def of(node: Node) -> list[str]:
            there = (node.device if tier is Tier.DEVICE else node.host) is not None
            return node.hashes if there and (extra_key is None or node.extra_key == extra_key) else []

        return each_node(self._tree.root, self._lock, of)

    def use(self) -> list[TierUse]:
        """The use of device and host."""
        page_bytes = self.host.shape.page_bytes
        tables = [(Tier.HOST, self.host.table)]
        if self.copies is not None:
            tables.insert(0, (Tier.DEVICE, self.copies.device.table))
        with self._lock:
            now = time.monotonic()
            pinned = self._tree.pinned_pages(now)
            details = {
                Tier.DEVICE: {"hits": self._counts["device_hits"], "evicted": self._counts["evicted_device"]},
                Tier.HOST: {
                    "hits": self._counts["host_hits"],
                    "evicted": self._counts["evicted_host"],
                    "misses": self._counts["misses"],
                    "pinned": pinned,
                },
            }
        uses = []
        for tier, table in tables:
            counts = table.counts()
            used = counts["reserved"] + counts["present"]
            details[tier]["read"] = counts["read"]
            uses.append(TierUse(tier, table.pages, used, counts["reserved"], page_bytes, details[tier]))
        return uses

    # Keeper of the controller.

    def reserve(self, count: int, behind: Sequence[str]) -> Pages | NotEnoughPages:
        """Host pages, at the cost of what is worth least, but of nothing that they stand behind, and of nothing at all
        where that would not be enough. Its ``missing`` is a lower bound where pins or readers block eviction."""
        with self._lock:
            pages = self.host.table.take(count)
            if isinstance(pages, NotEnoughPages):
                kept = self._tree.lock_prefix(behind)
                try:
                    victims = self._host_victims(pages.missing)
                finally:
                    self._tree.unlock(kept)
                if isinstance(victims, NotEnoughPages):
                    return victims
                for node in victims:
                    self._drop_host(node)
                pages = self.host.table.take(count)
            return pages

    def keep(self, hashes: Sequence[str], covered: int, pages: Pages, extra_key: str) -> int:
        """Prefetched pages are in the tree from now on; what came twice, or stands on nothing any more, is freed."""
        with self._lock:
            spare = self._tree.insert_host(hashes, covered, pages.tolist(), extra_key=extra_key)
            if spare:
                self.host.table.release(as_pages(spare))
            if len(spare) < len(pages):
                self._tell(Tier.HOST, "stored", hashes[covered:], hashes[covered - 1] if covered else "")
            return self._tree.leading(hashes)[1]

    def pages_of(self, hashes: Sequence[str]) -> Pages:
        """Host pages of the leading hashes, read-locked; as many as the host has, whether the device has them or
        not."""
        return self.pages_behind(hashes, 0)

    def pages_behind(self, hashes: Sequence[str], first: int) -> Pages:
        """Does the same for those behind the ``first`` ones. A prompt that is lent in parts stays the nodes that it is,
        and a node stays whole while a part of it is read."""
        with self._lock:
            found, names, begin = list[int](), list[str](), 0
            for node in self._tree.match(hashes, split=False).nodes:
                if node.host is None or node.writing:
                    break
                part = slice(max(0, first - begin), len(hashes) - begin)
                found.extend(node.host[part])
                names.extend(node.hashes[part])
                begin += len(node)
            # The tree believes that a hash is of all before it. A stranger may have named one that is not.
            asked = list(hashes[first : first + len(names)])
            if names != asked:
                del found[sum(1 for _ in takewhile(bool, map(eq, names, asked))) :]
            pages = as_pages(found)
            self.host.table.read(pages)
            return pages

    def on_ack(self, ack: CopyAck) -> None:
        """For ``CopyEngine(on_ack=...)``: settles the tree, on the copying thread."""
        from kvgrpc.prefetch.copies.copy_operation import Direction

        with self._lock:
            if ack.direction is Direction.DOWN:
                self._written(ack)
            else:
                self._loaded(ack)

    # Under the lock.

    def _written(self, ack: CopyAck) -> None:
        node = ack.node
        assert isinstance(node, Node)
        ours = set(ack.host_pages.tolist())
        written: list[Node] = []
        walk: Node | None = node
        # A node that was split meanwhile is several now, the parts before it above it.
        while walk is not None and walk.host and walk.host[0] in ours:
            written.insert(0, walk)
            walk = walk.parent
        for part in written:
            if ack.ok:
                self._tree.written(part)
            else:
                self._tree.set_host(part, None)
        self._tree.unlock(node)
        if ack.ok and written:
            self._tell(Tier.HOST, "stored", [each for part in written for each in part.hashes], written[0].before)
            self._back_up(written[-1], [each for part in written for each in part.hashes], ack.host_pages)

    def _loaded(self, ack: CopyAck) -> None:
        held = ack.node
        assert isinstance(held, PinnedPrefix)
        held.loading -= 1
        pages = ack.device_pages
        # Nodes may have been split, so the chain is read anew; it is locked, so it is there.
        for node in last_nodes(held.node, len(pages)) if ack.ok else ():
            part, pages = pages[: len(node)], pages[len(node) :]
            if node.device is None:
                # An insert that came before has settled the front of this load, and the copy engine then none of it.
                self._copies().device.table.commit_reserved(part)
                self._tree.set_device(node, part.tolist())
                self._tell(Tier.DEVICE, "stored", node.hashes, node.before)
                self._loads.forget(held, part)
        if not ack.ok:
            # What an insert found to be spare is not free yet: it goes with its request, unless it stays for good.
            table = self._copies().device.table
            kept = {page for page in pages.tolist() if ack.quiescent and table.state(page) is PageState.PRESENT}
            self._loads.forget(held, as_pages([page for page in pages.tolist() if page not in kept]))
        self._tree.unlock(held.node)
        if held.released:
            self._free_loads(held)

    def _begin_load(self, held: PinnedPrefix, host: Pages, device: Pages, priority: int) -> None:
        copies = self._copies()
        self._tree.lock(held.node)
        self._loads.begin(held, device)
        try:
            copies.load(host, node=held, priority=priority, device_pages=device)
        except Exception:
            self._loads.undo(held, device)
            self._tree.unlock(held.node)
            copies.device.table.release(device)
            raise

    def _free_loads(self, held: PinnedPrefix) -> None:
        """Gives back what a request loaded although another had brought it, once nothing of it moves."""
        doubles = self._loads.take_doubles(held)
        if len(doubles):
            self._copies().device.table.release(doubles)

    def _back_up(self, last: Node, hashes: Sequence[str], pages: Pages) -> None:
        if self._writer is None or self._writer.storage is None or not self._backup:
            return
        try:
            self._writer.write_storage(hashes, pages, tenant=last.extra_key, extra_key=last.extra_key)
        except FeatureDisabled:
            pass  # it was closed: what is copied yet stays on the host
        except TooManyRequests as error:
            text = f"pages that reached the host are not backed up ({len(pages)}): {error}"
            self._lines.warning("backups that were refused", text)

    def _write_through(self, nodes: Sequence[Node], used: int | None = None) -> None:
        if self.write_policy is WritePolicy.WRITE_BACK:
            return
        for node in nodes:
            if (node.hits if used is None else used) >= self._write_hits:
                self._write(node)

    def _write(self, node: Node) -> bool:
        """Begins to copy it to the host, after what lies before it and is not there: behind a gap nobody finds it."""
        if node.device is None or node.host is not None:
            return False
        missing = [node]
        while (before := missing[-1].parent) is not None and before.parent is not None and before.host is None:
            missing.append(before)
        return all(self._write_one(each) for each in reversed(missing))

    def _write_one(self, node: Node) -> bool:
        if self.copies is None or node.device is None:
            return False
        # Before there is room: that does not come from what lies before it. The ack unlocks it.
        self._tree.lock(node)
        room = self.reserve(len(node), ())
        if isinstance(room, NotEnoughPages):
            self._tree.unlock(node)
            return False
        self._tree.set_host(node, room.tolist(), writing=True)
        try:
            self.copies.write(node.device, node=node, priority=node.priority, host_pages=room)
        except Exception as error:
            # Whoever matches, inserts or wants room goes on without this copy.
            self._tree.set_host(node, None)
            self._tree.unlock(node)
            self.host.table.release(room)
            if not isinstance(error, TooManyRequests):
                self._lines.exception("copies to the host", f"a copy to the host could not be begun: {error}")
            return False
        return True

    def _device_victims(self, count: int) -> list[Node] | NotEnoughPages:
        """Nodes of so many pages. Where they are certainly fewer, that is said without a look at them."""
        now = time.monotonic()
        lacking = count - self._tree.most_victims(now, device=True)
        return NotEnoughPages(lacking) if lacking > 0 else _enough(self._tree.device_victims(count, now), count)

    def _drop_from_device(self, victims: Sequence[Node]) -> int:
        """Returns how many pages it freed; one that a write back copies first goes the next time."""
        freed = 0
        back = self.write_policy is WritePolicy.WRITE_BACK
        for node in victims:
            if back and node.host is None:
                self._write(node)
            # A write locks the node and all before it: their device pages are what it copies, or what it stands on.
            # Room for it may have split a node of these, whose front then stays, and so does what is before that.
            if node.locks or node.device_children:
                continue
            freed += self._drop_device(node)
        return freed

    def _drop_device(self, node: Node) -> int:
        before, hashes = node.before, list(node.hashes)
        pages = as_pages(self._tree.drop_device(node))
        self._copies().device.table.release(pages)
        self._counts["evicted_device"] += len(pages)
        self._tell(Tier.DEVICE, "removed", hashes, before)
        return len(pages)

    def _host_victims(self, count: int) -> list[Node] | NotEnoughPages:
        now = time.monotonic()
        lacking = count - min(self._tree.most_victims(now, device=False), self.host.table.unread_count())
        return (
            NotEnoughPages(lacking)
            if lacking > 0
            else _enough(self._tree.host_victims(count, now, self._unread), count)
        )

    def _unread(self, node: Node) -> bool:
        pages = as_pages(node.host or [])
        return len(self.host.table.unread(pages)) == len(pages)

    def _drop_host(self, node: Node) -> int:
        before, hashes = node.before, list(node.hashes)
        pages = as_pages(self._tree.drop_host(node))
        self.host.table.release(pages)
        self._counts["evicted_host"] += len(pages)
        self._tell(Tier.HOST, "removed", hashes, before)
        return len(pages)

    def _tell(self, tier: Tier, what: str, hashes: Sequence[str], before: str) -> None:
        if self._listener is not None and hashes:
            try:
                self._listener(tier, what, hashes, before)
            except Exception as error:
                # The pages have changed hands already.
                self._lines.exception("listeners", f"a listener of the cache failed: {error}")

    def _copies(self) -> CopyEngine:
        if self.copies is None:
            raise FeatureDisabled(
                "this cache has no device tier",
                metadata={"feature": "device tier", "howToEnable": "give TieredCache a CopyEngine"},
            )
        return self.copies


def _enough(victims: list[Node], count: int) -> list[Node] | NotEnoughPages:
    lacking = count - sum(map(len, victims))
    return NotEnoughPages(lacking) if lacking > 0 else victims


__all__ = ["CacheListener", "PinnedPrefix", "TieredCache"]
