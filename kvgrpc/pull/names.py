"""The common names of pages that an engine names in a way of its own, as far as it has met their tokens."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvgrpc.hashing import Tokens, page_hashes

# Of prompts that wait to be hashed. What is beyond them has no common names: it is computed.
MOST_TOKENS = 1 << 20


class NotedNames:
    """PageNames from prompts that somebody saw. ``note`` is for the engine's own thread: it hashes nothing."""

    def __init__(self, page_tokens: int, most: int) -> None:
        """``most``: pages that are remembered, those that were noted last."""
        self._page_tokens = page_tokens
        self._most = most
        self._lock = threading.Lock()
        # Held for no longer than a moment, since the engine's thread waits for it.
        self._noting = threading.Lock()
        self._noted: deque[_Prompt] = deque()
        self._waiting = 0
        self._closed = False
        # By use: what was noted last comes last.
        self._common: dict[bytes, bytes] = {}
        self._own: dict[bytes, bytes] = {}
        self._hashing = ThreadPoolExecutor(1, "kvgrpc-names")

    def note(self, own: Sequence[bytes], tokens: Tokens, seed: bytes = b"") -> None:
        """A prompt and the engine's hashes of its full pages. ``seed``: what its chain of common names begins with."""
        if not own or len(tokens) < len(own) * self._page_tokens:
            return
        with self._noting:
            if self._closed or self._waiting + len(tokens) > MOST_TOKENS:
                return
            self._waiting += len(tokens)
            self._noted.append(_Prompt(own, tokens, seed))
            with contextlib.suppress(RuntimeError):  # no thread can be had: whoever asks for the names hashes them
                self._hashing.submit(self._settle)

    def common(self, own: Sequence[str]) -> list[str]:
        return self._leading(self._common, own)

    def own(self, common: Sequence[str]) -> list[str]:
        return self._leading(self._own, common)

    def close(self) -> None:
        """Prompts are noted no more."""
        with self._noting:
            self._closed = True
        self._hashing.shutdown(wait=False, cancel_futures=True)

    def _leading(self, names: Mapping[bytes, bytes], asked: Sequence[str]) -> list[str]:
        self._settle()  # the prompt in question may have come a moment ago
        found = []
        with self._lock:
            for each in asked:
                name = names.get(bytes.fromhex(each))
                if name is None:
                    break
                found.append(name.hex())
        return found

    def _settle(self) -> None:
        with self._lock:
            while (prompt := self._next()) is not None:
                self._remember(prompt)

    def _next(self) -> _Prompt | None:
        with self._noting:
            if not self._noted:
                return None
            prompt = self._noted.popleft()
            self._waiting -= len(prompt.tokens)
            return prompt

    def _remember(self, prompt: _Prompt) -> None:
        """Under the lock. Leading pages go last, since without them those behind are of no use."""
        whole = prompt.tokens[: len(prompt.own) * self._page_tokens]
        common = page_hashes(whole, self._page_tokens, after=prompt.seed)
        for own, name in zip(reversed(prompt.own), reversed(common), strict=True):
            self._common.pop(own, None)
            self._own.pop(name, None)
            self._common[own], self._own[name] = name, own
        while len(self._common) > self._most:
            self._own.pop(self._common.pop(next(iter(self._common))), None)


@dataclass(frozen=True, slots=True)
class _Prompt:
    own: Sequence[bytes]
    tokens: Tokens
    seed: bytes


__all__ = ["MOST_TOKENS", "NotedNames"]
