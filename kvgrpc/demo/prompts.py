"""The questions of the demo: built-in prompts, or the lines of a file. A token is a byte of UTF-8."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvgrpc.demo.engine.config import DECODE, PREFILL

BEGIN_TOKEN = 256
ANSWER_TOKENS = 32
# The reference keeps prompt and answer in a pool of the same size as prefill's.
LONGEST_PROMPT = min(PREFILL.capacity, DECODE.capacity) - ANSWER_TOKENS


class PromptsInvalid(Exception):
    """The file cannot be used; the text says which line and why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. ``after``: number of the prompt whose answer must be complete before this one is sent."""

    title: str
    tokens: tuple[int, ...]
    after: int | None = None


def built_in() -> list[Prompt]:
    """Short; longer than a chunk; with the same beginning; a few thousand tokens; and the next turn of that one."""
    instructions = "You answer from these notes alone. " + _notes(22)
    document = "Summarise this report. " + _notes(60)
    return [
        Prompt("a short question", tokens_of("Where does the KV cache of this sentence go?")),
        Prompt("longer than a chunk", tokens_of(instructions + "Question: who may reuse a page, and when?")),
        Prompt("the same instructions", tokens_of(instructions + "Question: what does a router need to know?")),
        Prompt("a few thousand tokens", tokens_of(document)),
        Prompt("its next turn", tokens_of(document + "And now in one sentence, please."), after=3),
    ]


def from_file(path: Path) -> list[Prompt]:
    """One prompt for each line that is not empty. Raises PromptsInvalid."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsInvalid(f"{path}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        tokens = tokens_of(line)
        if len(tokens) > LONGEST_PROMPT:
            raise PromptsInvalid(
                f"{path}, line {number}: {len(tokens)} tokens (bytes); the demo's pools hold {LONGEST_PROMPT}"
            )
        prompts.append(Prompt(line if len(line) <= 24 else line[:23] + "…", tokens))
    if not prompts:
        raise PromptsInvalid(f"{path}: no prompt in it; write one a line")
    return prompts


def tokens_of(text: str) -> tuple[int, ...]:
    """A text as the demo's engines read it."""
    return (BEGIN_TOKEN, *text.encode())


def _notes(count: int) -> str:
    """Text of about 65 bytes a note, no two alike."""
    things = ("page", "prefix", "room", "rank", "layer", "lease", "chunk")
    return "".join(
        f"Note {number}: the {things[number % 7]} of request {number * 37 % 101} went to {things[number * 3 % 7]} "
        f"{number * 53 % 97}. "
        for number in range(1, count + 1)
    )
