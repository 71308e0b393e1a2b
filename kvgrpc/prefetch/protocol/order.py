"""The order of one prefetch or backup, in one value from whoever asks to the operation. Pure."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.model import OperationKind

MAX_PAGES = 65_536
"""Pages of one operation."""
MAX_PRIORITY = 1_000
MAX_TIMEOUT = 3600.0
MAX_ENGINES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """``hashes``: the hexadecimal page hashes of the whole prompt, from its first page on.

    ``request_id``: a repeat is the same operation; empty: it has no repeats. ``operation_id``: the name that all ranks
    of a replica use. A smaller ``priority`` is more urgent; ``tenant``: who takes turns. ``extra_key``: the one that
    the hashes began with, part of the keys in storage. ``timeout``: seconds until it ends with what it has; None: the
    limits' own. ``engines``: those whose host caches pages may come from; none named: whichever there are.
    """

    kind: OperationKind
    hashes: tuple[str, ...]
    request_id: str = ""
    operation_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    priority: int = 0
    tenant: str = ""
    extra_key: str = ""
    timeout: float | None = None
    engines: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises InvalidRequest."""
        if not 1 <= len(self.hashes) <= MAX_PAGES:
            raise InvalidRequest.of("page_hashes", f"{len(self.hashes)} pages", f"1 to {MAX_PAGES} pages")
        if abs(self.priority) > MAX_PRIORITY:
            raise InvalidRequest.of("priority", self.priority, f"-{MAX_PRIORITY} to {MAX_PRIORITY}")
        if len(self.engines) > MAX_ENGINES:
            raise InvalidRequest.of("engines", f"{len(self.engines)} names", f"at most {MAX_ENGINES}")
        if self.timeout is not None and not 0 < self.timeout <= MAX_TIMEOUT:
            raise InvalidRequest.of("timeout", self.timeout, f"above 0, at most {MAX_TIMEOUT:g} seconds")

    def asks_the_same(self, other: Order) -> bool:
        """True if a repeat under one request id may stand for the other."""
        mine = (self.hashes, self.priority, self.tenant, self.extra_key, self.timeout, self.engines)
        return mine == (other.hashes, other.priority, other.tenant, other.extra_key, other.timeout, other.engines)
