"""The options that name the pages of a prompt, by tokens or by hashes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

FILE = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
_MAX_BYTES = 64 << 20

_OPTIONS = (
    click.option("--tokens", "tokens_text", default="", help="Tokens of the prompt, with commas or blanks between."),
    click.option(
        "--tokens-file", type=FILE, help='A file of tokens, or JSON as [1, 2] or {"tokens": [1, 2]}; "-": stdin.'
    ),
    click.option("--hash", "hashes", multiple=True, help="Page hash, 64 hexadecimal digits; once a page, in order."),
    click.option("--extra-key", default=None, help="Namespace within the model, such as a LoRA; part of the hashes."),
    click.option("--cache-salt", default=None, help="Salt of a tenant; part of the hashes."),
    click.option("--bigram", is_flag=True, help="Tokens are hashed as pairs (EAGLE)."),
)


def names_pages(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command these options; it gets ``pages``, a PromptPages."""

    @functools.wraps(function)
    def run(
        *arguments: Any,
        tokens_text: str,
        tokens_file: Path | None,
        hashes: tuple[str, ...],
        extra_key: str | None,
        cache_salt: str | None,
        bigram: bool,
        **options: Any,
    ) -> None:
        from kvgrpc.v1 import prefetch_service_pb2

        if sum(map(bool, (tokens_text, tokens_file, hashes))) != 1:
            raise click.UsageError("give the pages one way: --tokens, --tokens-file or --hash")
        pages = prefetch_service_pb2.PromptPages(extra_key=extra_key, cache_salt=cache_salt, bigram=bigram)
        if hashes:
            pages.page_hashes.extend(_hash(each) for each in hashes)
        else:
            pages.tokens.extend(_tokens(tokens_text) if tokens_file is None else _from_file(tokens_file))
        function(*arguments, pages=pages, **options)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


def _hash(text: str) -> bytes:
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise click.BadParameter(f"{text[:80]!r} is not 64 hexadecimal digits", param_hint="--hash")
    return bytes.fromhex(text)


def _tokens(text: str, option: str = "--tokens") -> list[int]:
    words = re.split(r"[\s,]+", text.strip(" \t\r\n,"))
    wrong = next((word for word in words if not re.fullmatch(r"\d{1,19}", word) or int(word) >= 2**63), None)
    if wrong is not None:
        raise click.BadParameter(f"{wrong[:40]!r} is no token: a whole number from 0 on", param_hint=option)
    return [int(word) for word in words]


def _from_file(path: Path) -> list[int]:
    option = "--tokens-file"
    try:
        with click.open_file(str(path)) as file:
            text = file.read(_MAX_BYTES + 1)
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{path} is no text: {error}", param_hint=option) from None
    if len(text) > _MAX_BYTES:
        raise click.BadParameter(f"{path} has more than {_MAX_BYTES} characters", param_hint=option)
    try:
        found = json.loads(text)
    except ValueError:
        return _tokens(text, option)
    except RecursionError:
        raise click.BadParameter(f"{path} is nested too deeply", param_hint=option) from None
    tokens = found.get("tokens") if isinstance(found, dict) else [found] if isinstance(found, int) else found
    if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < 2**63 for each in tokens):
        raise click.BadParameter('not a list of tokens, nor {"tokens": [...]}', param_hint=option)
    return tokens
