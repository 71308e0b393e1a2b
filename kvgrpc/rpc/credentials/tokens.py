"""The bearer token: made anew for each second and target from a secret that never travels, so that whoever gets one can
use it nowhere else. docs/tokens.md has the rule for other languages, tests/conformance/tokens its vectors.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvgrpc.errors import CredentialsInvalid

AUTHORIZATION = "authorization"
VERSION = "kvgrpc1"
CLOCK_SKEW_SECONDS = 60
# Who gets a token can try secrets against it for as long as he likes.
SHORTEST_SECRET = 16
_SCHEME = "bearer"
_LONGEST = 4_096
_KEY_ID_DIGITS = 16
_LONGEST_TIME = 12


def key_id(secret: str) -> str:
    """The name of a secret, by which a token says what made it; it tells nothing of the secret."""
    return _mac(secret.encode(), f"{VERSION} key id").hex()[:_KEY_ID_DIGITS]


def audience_key(secret: str, target: str) -> bytes:
    """Returns what makes and proves the tokens of one target, and of no other."""
    return _mac(secret.encode(), f"{VERSION} audience {target}")


def authorization(secret: str, target: str, now: int) -> str:
    """The value of the header, for a ``target`` as ``kvgrpc.net.target_of`` spells it, at Unix second ``now``."""
    signed = f"{VERSION}.{key_id(secret)}.{now}.{_encoded(target.encode())}"
    return f"Bearer {signed}.{_encoded(_mac(audience_key(secret, target), signed))}"


class HeaderSource:
    """Gives the header of the moment for one target. ``secret`` is asked each time: a file may have changed."""

    def __init__(self, secret: Callable[[], str], target: str) -> None:
        self._secret = secret
        self._target = target
        self._made_of: tuple[str, int] = ("", 0)
        self._header = ""

    def __call__(self) -> str:
        made_of = self._secret(), int(time.time())
        if made_of != self._made_of:
            self._header = authorization(made_of[0], self._target, made_of[1])
            self._made_of = made_of
        return self._header


@dataclass(frozen=True, slots=True)
class BearerToken:
    """The words of a header, before anything of it is proven."""

    key_id: str
    made_at: int
    target: str
    signed: str
    mac: bytes

    @classmethod
    def read(cls, header: str) -> BearerToken:
        """Raises CredentialsInvalid for whatever is no token of ours, a plain secret for one; never repeats it."""
        scheme, _, text = header.partition(" ")
        parts = text.strip().split(".") if header.isascii() and len(header) <= _LONGEST else []
        if scheme.lower() != _SCHEME or len(parts) != 5 or parts[0] != VERSION:
            raise _no_token("it is no token of kvgrpc (a plain secret is not taken: it would serve whoever hears it)")
        _, key, made_at, target, mac = parts
        try:
            if not (made_at.isdecimal() and len(made_at) <= _LONGEST_TIME):
                raise ValueError
            return cls(key, int(made_at), _decoded(target).decode(), text.strip().rpartition(".")[0], _decoded(mac))
        except ValueError:
            raise _no_token("a token of kvgrpc that cannot be read") from None

    def is_made_with(self, key: bytes) -> bool:
        """``key``: of its target. Takes a time that tells nothing of it."""
        return hmac.compare_digest(_mac(key, self.signed), self.mac)


def _no_token(what: str) -> CredentialsInvalid:
    how = "`kvgrpc token TARGET` prints the header, and docs/tokens.md says how clients make it"
    return CredentialsInvalid(f"the authorization header: {what}; {how}", metadata={"scheme": _SCHEME})


def _mac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), hashlib.sha256)


def _encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decoded(text: str) -> bytes:
    """Raises ValueError."""
    try:
        return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
