"""Certificates and keys: read before anything is opened, told apart by what is wrong, read again when they change."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from datetime import datetime, timezone
from typing import Any

import grpc

from kvgrpc.errors import InvalidRequest, KvGrpcError
from kvgrpc.rpc.credentials.reloading import read_small_file, stamp_of

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_LARGEST_CERTIFICATE = 1 << 20
_EXPLICIT_VERSION, _UTC_TIME = 0xA0, 0x17

_log = logging.getLogger(__name__)


def check_pair(cert_file: str, key_file: str) -> None:
    """Raises InvalidRequest naming the file that is no certificate or key, or a key that is another certificate's."""
    for path, field, mark, what, other in (
        (cert_file, "cert_file", "CERTIFICATE-----", "certificate", "key"),
        (key_file, "key_file", "PRIVATE KEY-----", "private key", "certificate"),
    ):
        if mark not in read_small_file(path, field):
            raise InvalidRequest.of(field, path, f"a file with a {what} in PEM (is it the {other}?)")
    try:
        # Without a password nobody is asked for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        rule = f"the unencrypted key of the certificate in {cert_file} ({_why(error)})"
        raise InvalidRequest.of("key_file", key_file, rule) from None


def check_authority(path: str, field: str) -> None:
    """Raises InvalidRequest naming a file that holds no certificates to trust."""
    read_small_file(path, field)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise InvalidRequest.of(field, path, f"a file with certificates in PEM ({_why(error)})") from None


def certificate_end(path: str) -> float | None:
    """When the first certificate of a PEM file ends (Unix seconds); None where it cannot be read. It reads the file."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            text = file.read(_LARGEST_CERTIFICATE)
        first = text[text.index(_BEGIN) : text.index(_END) + len(_END)]
        return _not_after(ssl.PEM_cert_to_DER_cert(first))
    except (OSError, ValueError, IndexError):
        return None


def _not_after(der: bytes) -> float:
    """RFC 5280, 4.1: certificate { tbs { [0] version, serial, algorithm, issuer, { notBefore, notAfter }, ... } }."""
    _, tbs, _ = _element(_element(der, 0)[1], 0)
    at = 0
    for _ in range(4 if tbs[0] == _EXPLICIT_VERSION else 3):
        _, _, at = _element(tbs, at)
    _, validity, _ = _element(tbs, at)
    _, _, at = _element(validity, 0)
    tag, text, _ = _element(validity, at)
    when = text.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: 1950 to 2049
        when = ("19" if when >= "5" else "20") + when
    return datetime.strptime(when, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()


def _element(der: bytes, at: int) -> tuple[int, bytes, int]:
    """Tag, content, and where the next element begins."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length & 0x80:
        octets = length & 0x7F
        length, begin = int.from_bytes(der[begin : begin + octets], "big"), begin + octets
    return tag, der[begin : begin + length], begin + length


class ServerCertificates:
    """A server's certificate that may be replaced while it runs: each handshake gets what the files hold then.

    What cannot be used leaves the last good pair in force, and is logged once. ``fetch`` is for the library's threads.
    Raises InvalidRequest at construction.
    """

    def __init__(self, cert_file: str, key_file: str, client_ca_file: str) -> None:
        self._files = (cert_file, key_file, client_ca_file)
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._current = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        fetch: Any = self.fetch  # its types do not know that None means "as before"
        return grpc.dynamic_ssl_server_credentials(self._current, fetch, bool(self._files[2]))

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The pair when it is new; None when nothing changed."""
        with self._lock:
            stamp = self._look()
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            try:
                self._current = self._read()
            except KvGrpcError as error:
                _log.error("the certificate changed and cannot be used, the one before stays: %s", error.message)
                return None
        _log.info("cert_file: read %s again", self._files[0])
        return self._current

    def _look(self) -> tuple[object, ...]:
        return tuple(stamp_of(path) for path in self._files if path)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        cert_file, key_file, client_ca_file = self._files
        check_pair(cert_file, key_file)
        authority = None
        if client_ca_file:
            check_authority(client_ca_file, "client_ca_file")
            authority = _bytes(client_ca_file)
        end = certificate_end(cert_file)
        if end is not None:
            from kvgrpc.observability import metrics  # a client has no certificate that ends, and loads none

            metrics.CERTIFICATE_END.labels(cert_file).set(end)
        return grpc.ssl_server_certificate_configuration([(_bytes(key_file), _bytes(cert_file))], authority)


def client_credentials(ca_file: str, cert_file: str, key_file: str) -> grpc.ChannelCredentials:
    """Raises InvalidRequest naming a file that cannot be used."""
    check_authority(ca_file, "ca_file")
    if not cert_file:
        return grpc.ssl_channel_credentials(_bytes(ca_file))
    check_pair(cert_file, key_file)
    return grpc.ssl_channel_credentials(_bytes(ca_file), _bytes(key_file), _bytes(cert_file))


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _why(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or os.path.basename(type(error).__name__)
