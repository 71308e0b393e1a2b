"""The question of a Score, read from its messages: hashes, and the caches that are asked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kvgrpc import hashing
from kvgrpc.errors import InvalidRequest
from kvgrpc.events.following.prompts import each_sglang_hash
from kvgrpc.events.following.sources import LabelSet, Wanted
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.wire import seconds_from_pb

MAX_PROMPTS = 1024
# Each looks at all caches of its model, with estimates for each: tens of microseconds a cache.
MAX_PLAN_PROMPTS = 256
MAX_BLOCKS = 65_536
# What a request may carry; the server's own limit for a message lies above it.
MAX_TOKENS = 2**20
MAX_ENGINES = 1024
# Ways to hash one prompt: there are two engines today, and settings of one.
MAX_OTHER_KINDS = 3
MAX_ITEMS, MAX_LOOKAHEAD = 1024, 64
# Of all prompts of an answer together: some 4 MiB, which is what clients of any language take.
MAX_ANSWERS = 65_536
# Where a prompt leaves them open, it is hashed once for each.
MAX_PAGE_SIZES = 8
LONGEST_STALENESS_SECONDS = 86_400.0
# A rank has no more.
MAX_LABELS = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt: hashes that were given or are to be computed, by the tokens of a block (0: of any)."""

    given: Sequence[int] | None
    chains: dict[int, Iterator[int]]
    step: int
    tokens: int
    largest_block: int

    @property
    def hashed_tokens(self) -> int:
        """Tokens that go through a hash."""
        return self.tokens * len(self.chains)


class Budget:
    """The hashes and tokens that one request may still ask for."""

    def __init__(self) -> None:
        self._blocks, self._tokens, self._answers = MAX_BLOCKS, MAX_TOKENS, MAX_ANSWERS

    def take(self, field: str, tokens: int, blocks: int) -> None:
        """Raises InvalidRequest where it is too much, with what came before."""
        self._tokens -= tokens
        self._blocks -= blocks
        if self._tokens < 0:
            raise InvalidRequest.of(field, f"{tokens} of them", f"at most {MAX_TOKENS} in all prompts together")
        if self._blocks < 0:
            raise InvalidRequest.of(field, f"{blocks} blocks", f"at most {MAX_BLOCKS} blocks in all prompts together")

    def take_answers(self, field: str, most: int, answers: int) -> None:
        """``most``: of one prompt, as the caller set it. Raises InvalidRequest where they are too many with those of
        the prompts before."""
        self._answers -= answers
        if self._answers < 0:
            rule = f"so few that an answer has at most {MAX_ANSWERS} in all prompts together"
            raise InvalidRequest.of(field, most, rule)


def wanted_from_pb(request: pb.ScoreRequest) -> Wanted:
    """Returns which caches. Raises InvalidRequest."""
    if not 0 < len(request.prompts) <= MAX_PROMPTS:
        raise InvalidRequest.of("prompts", f"{len(request.prompts)} of them", f"1 to {MAX_PROMPTS}")
    if len(request.engines) > MAX_ENGINES:
        raise InvalidRequest.of("engines", f"{len(request.engines)} names", f"at most {MAX_ENGINES}")
    staleness = None
    if request.HasField("max_staleness"):
        staleness = seconds_from_pb("max_staleness", request.max_staleness, LONGEST_STALENESS_SECONDS)
    return Wanted(frozenset(request.engines), request.max_scores, request.with_freshness, staleness)


def wanted_of_plan(request: pb.PlanRequest) -> Wanted:
    """Returns which caches a plan may rest on. Raises InvalidRequest."""
    if not 0 < len(request.prompts) <= MAX_PLAN_PROMPTS:
        raise InvalidRequest.of("prompts", f"{len(request.prompts)} of them", f"1 to {MAX_PLAN_PROMPTS}")
    for index, each in enumerate(request.prompts):
        for name, named in (("engines", each.engines), ("sources", each.sources)):
            if len(named) > MAX_ENGINES:
                raise InvalidRequest.of(f"prompts[{index}].{name}", f"{len(named)} names", f"at most {MAX_ENGINES}")
        _check_other_kinds(each, f"prompts[{index}].other_kinds")
    staleness = None
    if request.HasField("max_staleness"):
        staleness = seconds_from_pb("max_staleness", request.max_staleness, LONGEST_STALENESS_SECONDS)
    return Wanted(freshness=False, max_staleness=staleness)


def _check_other_kinds(asked: pb.PlanPrompt, field: str) -> None:
    """They are one prompt, for the same caches."""
    first = asked.prompt
    if len(asked.other_kinds) > MAX_OTHER_KINDS:
        raise InvalidRequest.of(field, f"{len(asked.other_kinds)} of them", f"at most {MAX_OTHER_KINDS}")
    for index, other in enumerate(asked.other_kinds):
        if other.model not in ("", first.model):
            raise InvalidRequest.of(f"{field}[{index}].model", other.model, f"empty, or {first.model!r} as of prompt")
        if other.labels and dict(other.labels) != dict(first.labels):
            raise InvalidRequest.of(f"{field}[{index}].labels", "others", "none, or those of prompt")
        _check_same_request(first, other, f"{field}[{index}]")
    kinds = {each.WhichOneof("prefix") for each in (first, *asked.other_kinds)}
    if asked.other_kinds and not asked.tokens and kinds == {"block_hashes"}:
        # Of a cache that has nothing nobody knows by whose hashes and pages its prompt were to be measured.
        rule = "those of the request, where hashes of several kinds name it"
        raise InvalidRequest.of(f"{field.removesuffix('.other_kinds')}.tokens", 0, rule)


def _check_same_request(first: pb.ScorePrompt, other: pb.ScorePrompt, field: str) -> None:
    """Tokens can be compared, hashes cannot: with another adapter or salt, other pages would count for this request."""
    one, kind = _by_tokens(first), other.WhichOneof("prefix")
    another = _by_tokens(other)
    if one is None or another is None:
        return
    # SGLang has other numbers for the tokens of an image than vLLM.
    if not (_has_images(one) or _has_images(another)) and one.token_ids != another.token_ids:
        raise InvalidRequest.of(f"{field}.{kind}.token_ids", f"{len(another.token_ids)} others", "those of prompt")
    if one.cache_salt != another.cache_salt:
        raise InvalidRequest.of(f"{field}.{kind}.cache_salt", another.cache_salt, "that of prompt")
    # An extra key is SGLang's alone: vLLM's pages are of a request without.
    if _extra_key(one) != _extra_key(another):
        name = "sglang.extra_key" if kind == "sglang" else "vllm"
        raise InvalidRequest.of(f"{field}.{name}", _extra_key(another), "of a request with the extra key of prompt")
    if type(one) is type(another):
        differ = _adapter(one) != _adapter(another)
    else:  # each kind names an adapter in its own way
        differ = bool(_adapter(one)) != bool(_adapter(another))
    if differ:
        name = "lora_id" if kind == "sglang" else "lora"
        raise InvalidRequest.of(f"{field}.{kind}.{name}", "another", "the adapter of prompt, or none as there")


def _by_tokens(prompt: pb.ScorePrompt) -> pb.SglangPrompt | pb.VllmPrompt | None:
    kind = prompt.WhichOneof("prefix")
    return prompt.sglang if kind == "sglang" else prompt.vllm if kind == "vllm" else None


def _has_images(prompt: pb.SglangPrompt | pb.VllmPrompt) -> bool:
    return isinstance(prompt, pb.VllmPrompt) and bool(prompt.multimodal)


def _extra_key(prompt: pb.SglangPrompt | pb.VllmPrompt) -> str:
    return prompt.extra_key if isinstance(prompt, pb.SglangPrompt) else ""


def _adapter(prompt: pb.SglangPrompt | pb.VllmPrompt) -> str | tuple[str, str]:
    """Empty: none."""
    if isinstance(prompt, pb.SglangPrompt):
        return prompt.lora_id
    return (prompt.lora.name, prompt.lora.path) if prompt.HasField("lora") else ""


def labels_from_pb(prompt: pb.ScorePrompt, field: str) -> LabelSet:
    """Returns which the caches' ranks must have. Raises InvalidRequest."""
    if len(prompt.labels) > MAX_LABELS:
        raise InvalidRequest.of(f"{field}.labels", f"{len(prompt.labels)} of them", f"at most {MAX_LABELS}")
    return frozenset(prompt.labels.items())


def asked_from_pb(prompt: pb.ScorePrompt, field: str, sizes: Collection[int], budget: Budget) -> Asked:
    """``sizes``: those of the caches, for a prompt that leaves them open. Raises InvalidRequest."""
    kind = prompt.WhichOneof("prefix")
    if kind == "block_hashes":
        values = prompt.block_hashes.values
        budget.take(f"{field}.block_hashes.values", 0, len(values))
        return Asked(values, {}, 0, 0, 0)
    if kind == "sglang":
        return _asked_of_sglang(prompt.sglang, f"{field}.sglang", sizes, budget)
    if kind == "vllm":
        return _asked_of_vllm(prompt.vllm, f"{field}.vllm", sizes, budget)
    raise InvalidRequest.of(f"{field}.prefix", "absent", "one of block_hashes, sglang, vllm")


def _asked_of_sglang(prompt: pb.SglangPrompt, field: str, sizes: Collection[int], budget: Budget) -> Asked:
    by_size = _sizes(field, prompt.page_tokens, sizes)
    tokens = prompt.token_ids
    _take(budget, field, len(tokens), by_size)
    chains = {
        size if not prompt.page_tokens else 0: each_sglang_hash(
            tokens,
            size,
            cache_salt=prompt.cache_salt,
            bigram=prompt.bigram,
            extra_key=prompt.extra_key if prompt.HasField("extra_key") else None,
            lora_id=prompt.lora_id if prompt.HasField("lora_id") else None,
            dynamo=prompt.dynamo_format,
        )
        for size in by_size
    }
    return Asked(None, chains, 0, len(tokens), max(by_size, default=0))


def _asked_of_vllm(prompt: pb.VllmPrompt, field: str, sizes: Collection[int], budget: Budget) -> Asked:
    _check_vllm(prompt, field)
    step, tokens = prompt.hash_tokens, prompt.token_ids
    by_size = [step] if step else _sizes(field, prompt.page_tokens, sizes)
    _take(budget, field, len(tokens), by_size)
    chains = {size if not step and not prompt.page_tokens else 0: _vllm_hashes(prompt, size) for size in by_size}
    return Asked(None, chains, step, len(tokens), max(by_size, default=0))


def _vllm_hashes(prompt: pb.VllmPrompt, size: int) -> Iterator[int]:
    hashes = hashing.each_block_hash(
        prompt.token_ids,
        size,
        hash_seed=prompt.hash_seed or hashing.VLLM_HASH_SEED,
        algorithm=prompt.algorithm or "sha256",
        lora=(prompt.lora.name, prompt.lora.path) if prompt.HasField("lora") else None,
        cache_salt=prompt.cache_salt,
        multimodal=[(item.identifier, item.first_token, item.tokens) for item in prompt.multimodal],
        lookahead=prompt.lookahead_tokens,
    )
    return map(hashing.vllm_event_hash, hashes)


def _check_vllm(prompt: pb.VllmPrompt, field: str) -> None:
    if prompt.algorithm not in ("", *hashing.BLOCK_HASH_ALGORITHMS):
        raise InvalidRequest.of(
            f"{field}.algorithm", prompt.algorithm, f"one of {', '.join(hashing.BLOCK_HASH_ALGORITHMS)}"
        )
    if len(prompt.multimodal) > MAX_ITEMS:
        raise InvalidRequest.of(f"{field}.multimodal", f"{len(prompt.multimodal)} items", f"at most {MAX_ITEMS}")
    if prompt.lookahead_tokens > MAX_LOOKAHEAD:
        raise InvalidRequest.of(f"{field}.lookahead_tokens", prompt.lookahead_tokens, f"at most {MAX_LOOKAHEAD}")
    if prompt.hash_tokens and prompt.page_tokens % prompt.hash_tokens:
        raise InvalidRequest.of(f"{field}.hash_tokens", prompt.hash_tokens, f"a part of {prompt.page_tokens}")
    end = 0
    for index, item in enumerate(prompt.multimodal):
        if item.first_token < end or item.tokens < 1:
            text = f"{item.tokens} tokens from {item.first_token} on"
            raise InvalidRequest.of(f"{field}.multimodal[{index}]", text, f"at least 1 token, from {end} on")
        end = item.first_token + item.tokens


def _sizes(field: str, named: int, found: Collection[int]) -> Collection[int]:
    if named:
        return [named]
    if len(found) > MAX_PAGE_SIZES:
        text = (
            f"1 or more: these caches have {len(found)} sizes of blocks, and at most {MAX_PAGE_SIZES} may be left open"
        )
        raise InvalidRequest.of(f"{field}.page_tokens", 0, text)
    return sorted(found)


def _take(budget: Budget, field: str, tokens: int, sizes: Collection[int]) -> None:
    budget.take(f"{field}.token_ids", tokens * max(1, len(sizes)), sum(tokens // size for size in sizes))
