"""One engine of the demo: the model, its paged pool and its prefix cache, driven by one thread.

Prefill, decode and the single-process reference all compute through this one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvgrpc.demo.engine.config import EngineConfig
from kvgrpc.demo.engine.model import Llama
from kvgrpc.demo.engine.page_allocator import OutOfPages, PageAllocator
from kvgrpc.demo.engine.paging import Memory, PagedPool
from kvgrpc.demo.engine.prefix_cache import PrefixCache


@dataclass(slots=True)
class Run:
    """One prompt on its way through an engine: its pages in order, of which ``computed`` tokens are filled.

    ``reused`` of the pages came from the prefix cache.
    """

    prompt: tuple[int, ...]
    pages: list[int]
    computed: int = 0
    reused: int = 0

    @property
    def prompt_computed(self) -> bool:
        return self.computed >= len(self.prompt)


class DemoEngine:
    """The engine. Nothing here is thread-safe: whoever made it calls it."""

    def __init__(self, config: EngineConfig, memory: Memory) -> None:
        # More threads would split sums at other places, and a core is all that each process of the demo gets.
        torch.set_num_threads(1)
        self.config = config
        self.model = Llama(config.model).eval()
        self.memory = PagedPool(config, memory)
        self.pages = PageAllocator(config.pages)
        self.cache = PrefixCache(self.pages, config.page_tokens)
        self._scratch = self.pages.take(1)

    def admit(self, prompt: Sequence[int], room_for: int = 0) -> Run:
        """Reserves pages for a prompt and ``room_for`` tokens after it. Raises OutOfPages, and then holds nothing."""
        return self._reserve(prompt, room_for, [])

    def admit_to_compute(self, prompt: Sequence[int]) -> Run:
        """Admits like ``admit``, but takes whole chunks that the prefix cache has from there.

        The last token is computed in any case: the first token of the answer follows from it.
        """
        found = self.cache.match(prompt[: len(prompt) - 1])
        whole = len(found) - len(found) % self.config.chunk_pages
        self.pages.release(found[whole:])
        return self._reserve(prompt, 0, found[:whole])

    def admit_to_receive(self, prompt: Sequence[int], room_for: int) -> Run:
        """Admits like ``admit``, but takes all pages that the prefix cache has: only the others need to come."""
        return self._reserve(prompt, room_for, self.cache.match(prompt))

    def take_pages(self, count: int) -> list[int]:
        """Free pages, at the cost of what is only cached. Raises OutOfPages, and then leaves the cache alone."""
        if count > self.pages.free + self.cache.idle:
            raise OutOfPages(f"{count} pages wanted, {self.pages.free} free and {self.cache.idle} only cached")
        self.cache.evict(count - self.pages.free)
        return self.pages.take(count)

    def compute_chunk(self, run: Run) -> int:
        """Computes the next chunk of the prompt and returns the most likely token after it."""
        start, size = run.computed, self.config.chunk_tokens
        piece = run.prompt[start : start + size]
        # A shorter last chunk is filled up: matrices of another size would be summed in another order. What the filling
        # writes lies behind the prompt, where nothing looks at it before it is overwritten.
        filling = size - len(piece)
        caches = self.memory.sequence(run.pages + self._scratch * self.config.pages_for(filling))
        tokens = torch.tensor(piece + (0,) * filling)
        logits = self.model(tokens, start, caches, last=len(piece) - 1)
        run.computed = start + len(piece)
        return int(logits.argmax())

    def compute_token(self, run: Run, token: int) -> int:
        """Appends one token of the answer and returns the most likely one after it."""
        logits = self.model(torch.tensor([token]), run.computed, self.memory.sequence(run.pages))
        run.computed += 1
        return int(logits.argmax())

    def keep(self, run: Run) -> None:
        """Lets the prefix cache keep the full pages of the prompt that are computed so far."""
        self.cache.insert(run.prompt[: run.computed], run.pages)

    def received(self, run: Run) -> None:
        """The whole prompt's KV cache has come from elsewhere."""
        run.computed = len(run.prompt)

    def release(self, run: Run) -> None:
        """Gives the pages of a run back; those that the prefix cache keeps stay there."""
        self.pages.release(run.pages)
        run.pages = []

    def _reserve(self, prompt: Sequence[int], room_for: int, reused: list[int]) -> Run:
        try:
            fresh = self.take_pages(self.config.pages_for(len(prompt) + room_for) - len(reused))
        except OutOfPages:
            self.pages.release(reused)
            raise
        return Run(tuple(prompt), reused + fresh, len(reused) * self.config.page_tokens, len(reused))
