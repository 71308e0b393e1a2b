"""The ranks of one engine's pipeline stages, opened together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from kvgrpc.model import Role
from kvgrpc.server import RankConfig, open_decode, open_prefill


class Stage(Protocol):
    """One scheduler process of an engine."""

    def config(self, role: Role, pp: int, stages: int, registry: str) -> RankConfig: ...


@contextlib.contextmanager
def opened(role: Role, stages: Sequence[Stage], registry: str) -> Iterator[list[Any]]:
    with contextlib.ExitStack() as stack:
        opens = open_prefill if role is Role.PREFILL else open_decode
        configs = [stage.config(role, pp, len(stages), registry) for pp, stage in enumerate(stages)]
        yield [stack.enter_context(opens(config)) for config in configs]
