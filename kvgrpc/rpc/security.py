"""The settings of who may talk to whom, and how: TLS, the secrets of tokens, and the three roles of callers.

Structural: a server that others can reach and nothing protects exists only where ``insecure`` says so; so does a token
in plaintext. ``credentials/`` has what proves it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from kvgrpc.errors import AddressNotAllowed, InvalidRequest, KvGrpcError
from kvgrpc.net import check_target, is_local, target_of
from kvgrpc.rpc.credentials.reloading import ReloadedFile, stamp_of
from kvgrpc.rpc.credentials.secrets import CallerRole, Token, checked_token
from kvgrpc.rpc.credentials.tls import ServerCertificates, client_credentials
from kvgrpc.rpc.credentials.token_table import TokenTable
from kvgrpc.rpc.credentials.tokens import HeaderSource

# With the words that the settings are written in.
__all__ = ["CallerRole", "ClientSecurity", "ServerSecurity", "Token"]


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

    def token_table(self) -> TokenTable:
        """The secrets of those who may call. Raises InvalidRequest for a file that is wrong or lets nobody in."""
        return TokenTable(self.tokens, self.token_file, others_may_call=bool(self.client_ca_file))


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
        return None if secret is None else HeaderSource(secret, target_of(self.audience or address))

    def _secret_source(self) -> Callable[[], str] | None:
        if self.token:
            secret = checked_token(self.token, "token")
            return lambda: secret
        if self.token_file:
            parse = functools.partial(checked_token, field="token_file", file=self.token_file)
            return ReloadedFile(self.token_file, "token_file", parse).value
        return None


def _not_allowed(text: str, address: str) -> KvGrpcError:
    """Programs take options, engines that embed us often only the environment: both names are said."""
    return AddressNotAllowed(
        f"{text}, or allow it with --insecure (KVGRPC_INSECURE=1)",
        metadata={"address": address, "configKey": "insecure"},
    )
