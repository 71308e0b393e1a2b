"""What the demo asks."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest

from kvgrpc.demo.engine.config import PREFILL
from kvgrpc.demo.prompts import BEGIN_TOKEN, LONGEST_PROMPT, PromptsInvalid, built_in, from_file


def test_the_built_in_prompts_show_every_case() -> None:
    short, longer, same_beginning, long, next_turn = built_in()
    assert len(short.tokens) < PREFILL.chunk_tokens < len(longer.tokens)
    assert shared(longer.tokens, same_beginning.tokens) > PREFILL.chunk_tokens
    assert 3000 <= len(long.tokens) <= len(next_turn.tokens) <= LONGEST_PROMPT
    assert next_turn.after == 3
    assert next_turn.tokens[: len(long.tokens)] == long.tokens


def test_together_they_need_more_pages_than_prefill_has_so_that_some_are_evicted() -> None:
    prompts = built_in()
    pages = {prompt.tokens[:end] for prompt in prompts for end in range(16, len(prompt.tokens) + 1, 16)}
    assert len(pages) > PREFILL.pages


def test_every_line_with_text_is_a_prompt_of_bytes(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("a page?\n\n  \nGrüße\n", encoding="utf-8")
    assert [prompt.tokens for prompt in from_file(file)] == [
        (BEGIN_TOKEN, *b"a page?"),
        (BEGIN_TOKEN, *"Grüße".encode()),
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\n \n", "no prompt in it"),
        (b"short\n" + b"a" * LONGEST_PROMPT, "line 2: 4049 tokens"),
        (b"\xff\xfe", "codec can't decode"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, content: bytes, text: str) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(PromptsInvalid, match=text):
        from_file(file)


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(PromptsInvalid, match="No such file"):
        from_file(tmp_path / "nothing")


def shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
