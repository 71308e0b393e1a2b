"""The findings of the demo, as plain values: the base of the table, the JSON and the exit code."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from kvgrpc.demo.event_check import EventResult
from kvgrpc.demo.prompts import Prompt
from kvgrpc.demo.protocol import AnswerToken, Finished, Prefilled, Received, RoomFailed


@dataclass(slots=True)
class PromptResult:
    """One prompt: what prefill and decode made of it, and what the reference did. Moments are CLOCK_MONOTONIC."""

    prompt: Prompt
    room: int
    asked_at: float = 0.0
    tokens: list[int] = field(default_factory=list)
    reference_tokens: list[int] = field(default_factory=list)
    digest: str = ""
    reference_digest: str = ""
    pages_moved: int = 0
    reused_by_prefill: int = 0
    reused_by_decode: int = 0
    compute_seconds: float = 0.0
    sent_at: float = 0.0
    received_at: float = 0.0
    first_token_at: float = 0.0
    finished: bool = False
    prefilled: bool = False
    reference_finished: bool = False
    failure: str = ""

    @property
    def ended(self) -> bool:
        """Answered and its pages given back, or failed."""
        return bool(self.failure) or (self.finished and self.prefilled)

    @property
    def handoff_seconds(self) -> float | None:
        """From prefill's last send to decode's Success; None where one of them did not come."""
        return self.received_at - self.sent_at if self.received_at and self.sent_at else None

    @property
    def first_token_seconds(self) -> float | None:
        """From the question to the first token; None where none came."""
        return self.first_token_at - self.asked_at if self.first_token_at else None

    @property
    def difference(self) -> str:
        """Says in words where it differs from the single process; "" where it does not."""
        if self.failure:
            return self.failure
        if not (self.finished and self.reference_finished):
            return "it was not answered to its end, or not by the single process"
        if self.tokens != self.reference_tokens:
            return f"token {_first_difference(self.tokens, self.reference_tokens) + 1} differs from the single process"
        if self.digest != self.reference_digest:
            return "the KV cache that arrived differs from the single process's"
        return ""


@dataclass(slots=True)
class CacheResult:
    """The second act: one conversation through storage. Pages, and seconds of each step."""

    title: str
    first_tokens: list[int]
    pages: int = 0
    stored_pages: int = 0
    nbytes: int = 0
    copy_seconds: float = 0.0
    store_seconds: float = 0.0
    found_after: tuple[int, int, int] = (0, 0, 0)
    """Leading pages on the device, on device or host, and anywhere, once they were dropped from device and host."""
    prefetched_pages: int = 0
    prefetch_seconds: float = 0.0
    loaded_pages: int = 0
    reused_pages: int = 0
    first_token_seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)
    problem: str = ""
    storage: str = "file"
    asked_pages: int = 0
    """Full pages of the conversation's prompt, of which ``found_after`` says how many were where."""

    @property
    def hit_rate(self) -> float:
        """Of the prompt's pages, the share that storage had."""
        return self.found_after[2] / self.asked_pages if self.asked_pages else 0.0

    @property
    def difference(self) -> str:
        """Says in words what went wrong; "" when all is well."""
        if self.problem:
            return self.problem
        if not 0 < self.pages == self.stored_pages == self.found_after[2] == self.prefetched_pages == self.loaded_pages:
            return (
                f"of {self.pages} pages {self.stored_pages} were stored, {self.found_after[2]} found, "
                f"{self.prefetched_pages} prefetched and {self.loaded_pages} loaded"
            )
        if self.hit_rate < 1.0:
            return f"of {self.asked_pages} pages of the prompt only {self.found_after[2]} were found"
        if self.found_after[:2] != (0, 0):
            return "pages were left on device or host after they were dropped"
        if self.tokens != self.first_tokens:
            return f"token {_first_difference(self.tokens, self.first_tokens) + 1} differs from the first answer"
        return ""


@dataclass(slots=True)
class PullResult:
    """The third act: another engine answers the same conversation with the first one's pages."""

    first_tokens: list[int]
    pages: int
    """Pages that the first engine has on its host."""
    pulled_pages: int = 0
    nbytes: int = 0
    pull_seconds: float = 0.0
    reused_pages: int = 0
    first_token_seconds: float = 0.0
    tokens: list[int] = field(default_factory=list)

    @property
    def difference(self) -> str:
        """Says in words what went wrong; "" when all is well."""
        if not 0 < self.pages == self.pulled_pages or not self.reused_pages:
            return f"of {self.pages} pages {self.pulled_pages} were pulled and {self.reused_pages} reused"
        if self.tokens != self.first_tokens:
            return f"token {_first_difference(self.tokens, self.first_tokens) + 1} differs from the first answer"
        return ""


@dataclass(slots=True)
class DemoResult:
    """Everything. ``page``: where a browser sees the ranks, if anywhere.

    ``problem``: what kept the demo from its end, "" when nothing did. ``set_up_seconds``: the part of
    ``seconds`` until both ranks were open."""

    data_plane: str
    prompts: list[PromptResult] = field(default_factory=list)
    events: list[EventResult] = field(default_factory=list)
    cache: CacheResult | None = None
    pull: PullResult | None = None
    addresses: dict[str, str] = field(default_factory=dict)
    page: str = ""
    page_bytes: int = 0
    written_bytes: int = 0
    writing_seconds: float = 0.0
    set_up_seconds: float = 0.0
    seconds: float = 0.0
    problem: str = ""

    @property
    def gigabytes_per_second(self) -> float:
        return self.written_bytes / self.writing_seconds / 1e9 if self.writing_seconds else 0.0

    @property
    def difference(self) -> str:
        """The first thing that was not equal, or the problem; "" when all is well."""
        if self.problem:
            return self.problem
        for number, prompt in enumerate(self.prompts, 1):
            if prompt.difference:
                return f"prompt {number}: {prompt.difference}"
        for stream in self.events:
            if stream.difference:
                return f"events of {stream.engine}: {stream.difference}"
        if self.cache is not None and self.cache.difference:
            return f"storage: {self.cache.difference}"
        if self.pull is not None and self.pull.difference:
            return f"pull: {self.pull.difference}"
        moved = sum(prompt.pages_moved for prompt in self.prompts) * self.page_bytes
        if moved != self.written_bytes:
            return f"{self.written_bytes} bytes were written, the pages that arrived have {moved}"
        return ""

    @property
    def summary(self) -> str:
        """The demo's last line."""
        if self.difference:
            return f"kvgrpc demo: FAILED ({self.difference})"
        tokens = sum(len(prompt.tokens) for prompt in self.prompts)
        batches = sum(stream.batches for stream in self.events)
        return (
            f"kvgrpc demo: OK ({len(self.prompts)} prompts, {tokens} tokens as from a single process, "
            f"{self.written_bytes:,} bytes over {self.data_plane}, {batches} event batches, {self.seconds:.1f} s)"
        )

    def as_json(self) -> dict[str, Any]:
        """For programs: seconds, bytes and counts; tokens as numbers."""
        return {
            "ok": not self.difference,
            "reason": self.difference,
            "dataPlane": self.data_plane,
            "seconds": round(self.seconds, 3),
            "setUpSeconds": round(self.set_up_seconds, 3),
            "addresses": self.addresses,
            "pageBytes": self.page_bytes,
            "writtenBytes": self.written_bytes,
            "writingSeconds": self.writing_seconds,
            "gigabytesPerSecond": self.gigabytes_per_second,
            "prompts": [_prompt_as_json(prompt) for prompt in self.prompts],
            "cache": None if self.cache is None else _cache_as_json(self.cache),
            "pull": None if self.pull is None else {**asdict(self.pull), "equal": not self.pull.difference},
            "events": [{**asdict(stream), "equal": not stream.difference} for stream in self.events],
        }


def note(result: PromptResult, kind: str, message: Prefilled | Received | AnswerToken | Finished | RoomFailed) -> None:
    """Puts down what the process ``kind`` said of the prompt."""
    if isinstance(message, AnswerToken) and kind == "reference":
        result.reference_tokens.append(message.token)
    elif isinstance(message, Finished) and kind == "reference":
        result.reference_finished, result.reference_digest = True, message.digest
    elif isinstance(message, AnswerToken):
        result.first_token_at = result.first_token_at or time.monotonic()
        result.tokens.append(message.token)
    elif isinstance(message, Finished):
        result.finished = True
    elif isinstance(message, Prefilled):
        result.prefilled, result.reused_by_prefill = True, message.reused_pages
        result.compute_seconds, result.sent_at = message.compute_seconds, message.sent_at
    elif isinstance(message, Received):
        result.pages_moved, result.reused_by_decode = message.pages, message.reused_pages
        result.received_at, result.digest = message.received_at, message.digest
    elif isinstance(message, RoomFailed):
        result.failure = result.failure or f"{kind} says {message.reason}: {message.message}"


def _prompt_as_json(result: PromptResult) -> dict[str, Any]:
    return {
        "title": result.prompt.title,
        "room": str(result.room),
        "promptTokens": len(result.prompt.tokens),
        "tokens": result.tokens,
        "equal": not result.difference,
        "difference": result.difference,
        "pagesMoved": result.pages_moved,
        "pagesReusedByPrefill": result.reused_by_prefill,
        "pagesReusedByDecode": result.reused_by_decode,
        "computeSeconds": result.compute_seconds,
        "handoffSeconds": result.handoff_seconds,
        "firstTokenSeconds": result.first_token_seconds,
    }


def _cache_as_json(result: CacheResult) -> dict[str, Any]:
    return {
        "title": result.title,
        "equal": not result.difference,
        "difference": result.difference,
        "storage": result.storage,
        "pages": result.pages,
        "askedPages": result.asked_pages,
        "foundPages": result.found_after[2],
        "hitRate": result.hit_rate,
        "bytes": result.nbytes,
        "copySeconds": result.copy_seconds,
        "storeSeconds": result.store_seconds,
        "prefetchedPages": result.prefetched_pages,
        "prefetchSeconds": result.prefetch_seconds,
        "loadedPages": result.loaded_pages,
        "reusedPages": result.reused_pages,
        "firstTokenSeconds": result.first_token_seconds,
        "tokens": result.tokens,
    }


def _first_difference(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((number for number, (mine, other) in pairs if mine != other), min(len(left), len(right)))
