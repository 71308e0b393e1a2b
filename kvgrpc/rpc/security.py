"""Who may talk to whom, and how: TLS, the secrets of tokens, and the three roles of callers.

Structural: a server that others can reach and nothing protects exists only where ``insecure`` says so; so does a token
in plaintext.
"""

from __future__ import annotations

import enum
import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from kvgrpc.errors import (
    AddressNotAllowed,
    CredentialsExpired,
    CredentialsInvalid,
    InvalidRequest,
    KvGrpcError,
    WrongAudience,
)
from kvgrpc.net import check_target, is_local, target_of
from kvgrpc.rpc import tokens
from kvgrpc.rpc.audience import Audiences
from kvgrpc.rpc.reloading import ReloadedFile, stamp_of
from kvgrpc.rpc.tls import ServerCertificates, client_credentials

AUTHORIZATION = "authorization"


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


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """The protection of a server."""

    cert_file: str = ""
    """The server's TLS certificate (PEM); empty: plaintext."""
    key_file: str = ""
    """The key of the certificate."""
    client_ca_file: str = ""
    """Who signs client certificates; set: clients must have one, and a name in it ends in their role
    (``Caller.with_certificate``)."""
    tokens: tuple[Token, ...] = ()
    """Secrets of callers; none, no token_file and no client certificates: every caller has all roles."""
    token_file: str = ""
    """File with secrets of callers, a line each (``parse_tokens``); read again when it changes."""
    insecure: bool = False
    """A listener that others can reach without TLS, or without any proof of who calls, is meant."""
    health_without_token: bool = True
    """Whether ``Health/Check`` answers callers that prove nothing, as a kubelet; with client_ca_file they still need a
    certificate to connect at all."""
    audience: tuple[str, ...] = ()
    """Addresses by which clients dial this server, besides those that it binds and advertises: of a Service, a proxy,
    or replicas that share a name. Tokens for anything else are refused."""

    @property
    def tls(self) -> bool:
        return bool(self.cert_file)

    @property
    def authenticates(self) -> bool:
        return bool(self.tokens or self.token_file or self.client_ca_file)

    def check(self, address: str) -> None:
        """Raises AddressNotAllowed where others can reach what nothing protects, InvalidRequest for half of TLS."""
        if bool(self.cert_file) != bool(self.key_file):
            raise InvalidRequest.of("cert_file", self.cert_file, "given with key_file, and key_file with cert_file")
        if self.client_ca_file and not self.tls:
            raise InvalidRequest.of(
                "client_ca_file", self.client_ca_file, "given with cert_file and key_file: only TLS has certificates"
            )
        for each in self.audience:
            check_target(each, "audience")
        if self.insecure or is_local(address):
            return
        if not self.tls:
            how = "give cert_file and key_file (KVGRPC_CERT_FILE, KVGRPC_KEY_FILE)"
            raise _not_allowed(f"{address} is not loopback and there is no TLS: {how}", address)
        if not self.authenticates:
            how = "give client_ca_file or tokens_file (KVGRPC_CLIENT_CA_FILE, KVGRPC_TOKENS_FILE)"
            raise _not_allowed(f"{address} is not loopback and everybody could call it: {how}", address)

    def credentials(self) -> grpc.ServerCredentials | None:
        """None: plaintext. The files are read again when they change. Raises InvalidRequest for one that is wrong."""
        if not self.tls:
            return None
        return ServerCertificates(self.cert_file, self.key_file, self.client_ca_file).credentials()


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """The proof of a client, and the servers that it trusts."""

    ca_file: str = ""
    """Who signs the server's certificate (PEM); set: TLS."""
    cert_file: str = ""
    """The client's own certificate (mTLS)."""
    key_file: str = ""
    """The key of the certificate."""
    token: str = field(default="", repr=False)
    """The secret that tokens are made with. It is never sent."""
    token_file: str = ""
    """The file that holds the secret and nothing else; read again when it changes."""
    server_name: str = ""
    """Expected in the server's certificate when the address is not."""
    insecure: bool = False
    """A token may travel in plaintext outside loopback."""
    audience: str = ""
    """What tokens name in place of the address that is dialled, for one server behind a tunnel; for a client that dials
    several, each could use at the others what it gets."""

    @property
    def tls(self) -> bool:
        return bool(self.ca_file)

    def check(self, address: str) -> None:
        """Raises AddressNotAllowed where a token would travel in plaintext, InvalidRequest for half of TLS."""
        if bool(self.cert_file) != bool(self.key_file):
            raise InvalidRequest.of("cert_file", self.cert_file, "given with key_file, and key_file with cert_file")
        if self.cert_file and not self.tls:
            raise InvalidRequest.of("cert_file", self.cert_file, "given with ca_file: without it there is no TLS")
        if (self.token or self.token_file) and not (self.tls or self.insecure or is_local(address)):
            how = "give ca_file (KVGRPC_CA_FILE) for TLS"
            raise _not_allowed(f"a token would go to {address} in plaintext: {how}", address)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None: plaintext. Raises InvalidRequest for a file that is wrong."""
        return client_credentials(self.ca_file, self.cert_file, self.key_file) if self.tls else None

    @property
    def stamp(self) -> tuple[object, ...]:
        """Other once a file changed: a channel that was opened before has the old ones."""
        return tuple(stamp_of(path) for path in (self.ca_file, self.cert_file, self.key_file) if path)

    def header_source(self, address: str) -> Callable[[], str] | None:
        """Gives the authorization header of the moment for calls to ``address``; None: there is no secret.

        Raises InvalidRequest for a file without one.
        """
        secret = self._secret_source()
        return None if secret is None else tokens.HeaderSource(secret, target_of(self.audience or address))

    def _secret_source(self) -> Callable[[], str] | None:
        if self.token:
            secret = checked_token(self.token, "token")
            return lambda: secret
        if self.token_file:
            parse = functools.partial(checked_token, field="token_file", file=self.token_file)
            return ReloadedFile(self.token_file, "token_file", parse).value
        return None


class TokenTable:
    """The secrets of a server's callers, from its configuration and from the file that may change. Thread-safe."""

    def __init__(self, security: ServerSecurity) -> None:
        """Raises InvalidRequest for a file that cannot be read or parsed, or that lets nobody in. One that becomes
        empty later takes all its tokens back.
        """
        self._configured = security.tokens
        self._file = ReloadedFile(security.token_file, "tokens_file", parse_tokens) if security.token_file else None
        if self._file is not None and not (self._file.value() or security.tokens or security.client_ca_file):
            rule = "a file with a token, a line ROLE [NAME]:SECRET: without one nobody could call"
            raise InvalidRequest.of("tokens_file", security.token_file, rule)
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
            if len(token.secret) < tokens.SHORTEST_SECRET:
                rule = f"a secret of at least {tokens.SHORTEST_SECRET} characters: openssl rand -hex 32"
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


def _not_allowed(text: str, address: str) -> KvGrpcError:
    """Programs take options, engines that embed us often only the environment: both names are said."""
    return AddressNotAllowed(
        f"{text}, or allow it with --insecure (KVGRPC_INSECURE=1)",
        metadata={"address": address, "configKey": "insecure"},
    )
