"""The callers that a server knows by their tokens."""

from __future__ import annotations

import time

from kvgrpc.errors import CredentialsExpired, CredentialsInvalid, InvalidRequest, WrongAudience
from kvgrpc.net import is_local
from kvgrpc.rpc.credentials import tokens
from kvgrpc.rpc.credentials.audience import Audiences
from kvgrpc.rpc.credentials.reloading import ReloadedFile
from kvgrpc.rpc.credentials.secrets import Token, parse_tokens


class TokenTable:
    """The secrets of a server's callers, from its configuration and from a file that may change. Thread-safe."""

    def __init__(self, configured: tuple[Token, ...] = (), file: str = "", others_may_call: bool = False) -> None:
        """``others_may_call``: somebody gets in without a token.

        Raises InvalidRequest for a file that cannot be read or parsed, or that lets nobody in. One that becomes empty
        later takes all its tokens back.
        """
        self._configured = configured
        self._file = ReloadedFile(file, "tokens_file", parse_tokens) if file else None
        if self._file is not None and not (self._file.value() or configured or others_may_call):
            rule = "a file with a token, a line ROLE [NAME]:SECRET: without one nobody could call"
            raise InvalidRequest.of("tokens_file", file, rule)
        self._indexed: tuple[tuple[Token, ...], dict[str, Token]] = (), {}

    def check(self, header: str, audiences: Audiences, peer: str) -> Token:
        """Whose token the authorization ``header`` of ``peer`` has.

        Raises CredentialsInvalid, for an unknown secret and a wrong proof alike; only who has proven a secret is told
        more, by WrongAudience and CredentialsExpired.
        """
        offered = tokens.BearerToken.read(header)
        token = self._by_key_id().get(offered.key_id)
        secret = _NOBODYS_SECRET if token is None else token.secret
        proven = offered.is_made_with(tokens.audience_key(secret, offered.target))
        if token is None or not proven:
            raise CredentialsInvalid(
                "the token is made with no key of this server: compare token_file (KVGRPC_TOKEN_FILE) here with "
                "tokens_file there",
                metadata={"scheme": "bearer"},
            )
        if not audiences.include(offered.target, peer):
            local = " (a loopback address and a Unix socket count on their own host only)"
            raise WrongAudience(
                f"the token is for {offered.target}, and this server is {audiences}"
                f"{local if is_local(offered.target) else ''}: dial it so, or add the target to its setting audience "
                "(--audience, KVGRPC_AUDIENCE)",
                metadata={"target": offered.target, "audiences": audiences},
            )
        _check_age(offered.made_at)
        return token

    def _by_key_id(self) -> dict[str, Token]:
        of_the_file = self._file.value() if self._file is not None else ()
        indexed, found = self._indexed
        if not found or indexed is not of_the_file:
            found = {tokens.key_id(token.secret): token for token in (*self._configured, *of_the_file)}
            self._indexed = of_the_file, found
        return found


_NOBODYS_SECRET = "so that an unknown key takes as long as a known one"


def _check_age(made_at: int) -> None:
    age = int(time.time()) - made_at
    if abs(age) > tokens.CLOCK_SKEW_SECONDS:
        when = f"{age} s ago" if age > 0 else f"{-age} s ahead"
        raise CredentialsExpired(
            f"the token is of {when} by this server's clock, and holds for {tokens.CLOCK_SKEW_SECONDS} s: make a new "
            "one for each call; if that does not help, the clocks differ (set them by NTP)",
            metadata={"ageSeconds": age, "limitSeconds": tokens.CLOCK_SKEW_SECONDS},
        )
