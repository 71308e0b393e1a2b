"""The secrets that callers make their tokens with: whose each is, and the lines of a file that say so."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

from kvgrpc.errors import InvalidRequest
from kvgrpc.rpc.credentials.tokens import SHORTEST_SECRET


class CallerRole(enum.Enum):
    """The role of a caller: a rank of an engine, a consumer of events, or an operator."""

    RANK = "rank"
    CONSUMER = "consumer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Token:
    """The secret that a caller makes its bearer tokens with, and what its holder is.

    ``name``: whose it is; of a rank's token the engines that its holder may speak for, "prefill-*", and
    ``engine_role``, "prefill" or "decode", as what. Empty: any.
    """

    role: CallerRole
    secret: str = field(repr=False)
    name: str = ""
    engine_role: str = ""


def parse_tokens(text: str) -> tuple[Token, ...]:
    """Lines "role:secret", with a name or a scope before the colon: "consumer router-a:secret",
    "rank prefill-* role=prefill:secret". Blank lines and # comments are skipped.

    Raises InvalidRequest naming the line, also for a secret that is soon guessed from a token, and for a line that
    gives one another role, name or scope: whoever has it would be what the last line says.
    """
    found: dict[str, tuple[int, Token]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.strip().startswith("#"):
            token = _token_of(line)
            if token is None:
                # The line itself may hold a secret.
                rule = (
                    "ROLE [NAME]:SECRET with rank, consumer or operator, or rank ENGINES [role=prefill|decode]:SECRET"
                )
                raise InvalidRequest.of("tokens", f"line {number}", rule)
            if len(token.secret) < SHORTEST_SECRET:
                rule = f"a secret of at least {SHORTEST_SECRET} characters: openssl rand -hex 32"
                raise InvalidRequest.of("tokens", f"line {number}", rule)
            first, before = found.setdefault(token.secret, (number, token))
            if before != token:
                same = f"the same on lines {first} and {number}"
                raise InvalidRequest.of("tokens", same, "secrets that have one role, name and scope each")
    return tuple(token for _, token in found.values())


_ROLE_NAMES = {role.value for role in CallerRole}
_ENGINE_PATTERN = re.compile(r"[A-Za-z0-9._*?-]{1,128}")


def _token_of(line: str) -> Token | None:
    words, colon, secret = line.strip().partition(":")
    role, *scope = words.split() or [""]
    if not colon or not secret.strip() or role not in _ROLE_NAMES:
        return None
    engine_role = ""
    if role == CallerRole.RANK.value and scope and scope[-1].startswith("role="):
        engine_role = scope.pop().removeprefix("role=")
        if engine_role not in ("prefill", "decode"):
            return None
    if len(scope) > 1 or not all(_ENGINE_PATTERN.fullmatch(name) for name in scope):
        return None
    return Token(CallerRole(role), secret.strip(), "".join(scope), engine_role)


def checked_token(text: str, field: str, file: str = "") -> str:
    """The one word of ``text``. Raises InvalidRequest saying what is wrong with it, without showing it.

    ``field``: the setting or variable that it comes from, ``file``: the file, if it comes from one.
    """
    token = text.strip()
    wrong = _wrong_with(token)
    if wrong:
        where = f"{file}: " if file else ""
        raise InvalidRequest.of(field, where + wrong, "one word of printable ASCII characters")
    return token


def _wrong_with(token: str) -> str:
    if not token:
        return "nothing"
    if any(character.isspace() for character in token):
        return "text with white space in it"
    if not token.isascii():
        return "text with characters that are not ASCII"
    return "" if token.isprintable() else "text with control characters"
