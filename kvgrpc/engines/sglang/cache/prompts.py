"""Tokens behind the names of prompts that this process has hashed: SGLang's tree is asked by tokens. Pure but for a
lock."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.errors import FeatureDisabled
from kvgrpc.hashing import page_hashes, storage_seed

MAX_PROMPTS = 1024
MAX_TOKENS = 1 << 23


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """``tokens``: 8 bytes each, as SGLang's keys have them."""

    tokens: bytes
    extra_key: str | None
    cache_salt: str | None


class KnownPrompts:
    """The last prompts that were hashed, by the hash of their last page, which covers all before it. Thread-safe."""

    def __init__(self, page_tokens: int, *, bigram: bool) -> None:
        self._page_tokens = page_tokens
        self._bigram = bigram
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, PromptTokens] = OrderedDict()
        self._tokens = 0

    def hash(self, tokens: Sequence[int], extra_key: str | None, cache_salt: str | None) -> list[bytes]:
        """SGLang's names of the full pages. Raises InvalidRequest for what is no token."""
        hashes = page_hashes(tokens, self._page_tokens, after=storage_seed(extra_key, cache_salt), bigram=self._bigram)
        if hashes:
            self._remember(hashes[-1], PromptTokens(array("q", tokens).tobytes(), extra_key, cache_salt))
        return hashes

    def of(self, hashes: Sequence[str]) -> PromptTokens:
        """Raises FeatureDisabled where the tokens are not known here."""
        with self._lock:
            found = self._known.get(bytes.fromhex(hashes[-1]))
        if found is None:
            remedy = "give the prompt's tokens instead of page_hashes"
            raise FeatureDisabled(
                f"SGLang finds pages by their tokens: {remedy}",
                metadata={"feature": "page_hashes at SGLang", "howToEnable": remedy},
            )
        return found

    def _remember(self, name: bytes, prompt: PromptTokens) -> None:
        with self._lock:
            before = self._known.pop(name, None)
            self._known[name] = prompt
            self._tokens += (len(prompt.tokens) - (len(before.tokens) if before else 0)) // 8
            while len(self._known) > 1 and (len(self._known) > MAX_PROMPTS or self._tokens > MAX_TOKENS):
                _, gone = self._known.popitem(last=False)
                self._tokens -= len(gone.tokens) // 8
