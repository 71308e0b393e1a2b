"""Nobody answered: what listens at that address instead, and what to do next."""

from __future__ import annotations

import enum
import os
import socket

from kvgrpc.net import is_unix, split, unix_path

LOOK_SECONDS = 1.0
# What a client of HTTP/2 says first, and an empty SETTINGS frame.
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
SETTINGS = 4


class Listens(enum.Enum):
    """The thing that is at an address."""

    NOTHING = enum.auto()
    TLS = enum.auto()
    HTTP2 = enum.auto()
    SOMETHING_ELSE = enum.auto()
    SILENT = enum.auto()


def next_step(address: str, *, with_tls: bool, where: str) -> str:
    """``where``: how to find a server of the kind that was asked."""
    path = unix_path(address)
    if path and os.path.isdir(path):
        return f"{path} is a directory: name the socket in it."
    found = what_listens(address)
    if found is Listens.TLS and not with_tls:
        return (
            "This port speaks TLS: give --ca-file (who signs its certificate), and what proves you: --token-file, "
            "or --cert-file with --key-file."
        )
    if found is Listens.TLS:
        return (
            "This port speaks TLS: does --ca-file sign its certificate, has that the address among its names "
            "(else --server-name), and does it ask for one of yours (--cert-file with --key-file)?"
        )
    if found is Listens.HTTP2 and with_tls:
        return "This port speaks plaintext: leave out --ca-file."
    if found is Listens.HTTP2:
        return "Something serves there, but does not answer in time: --timeout gives it longer."
    if found is Listens.SOMETHING_ELSE:
        return f"This port answers, but does not speak gRPC: an HTTP port of the engine? {where}"
    if found is Listens.SILENT:
        return f"This port accepts connections and says nothing: it hangs, or does not speak gRPC. {where}"
    return f"Is it running? {where}"


def what_listens(address: str) -> Listens:
    """Connects twice, and waits a second each time."""
    try:
        if _shakes_hands(address):
            return Listens.TLS
        said = _answer_to_http2(address)
    except (OSError, ValueError):
        return Listens.NOTHING
    if said is None:
        return Listens.SILENT
    return Listens.HTTP2 if said[3:4] == bytes((SETTINGS,)) else Listens.SOMETHING_ELSE


def _shakes_hands(address: str) -> bool:
    """Only to see whether it does: nothing is sent over it, so nothing needs to be verified."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with _connected(address) as plain:
        try:
            context.wrap_socket(plain).close()
        except ssl.SSLError as error:
            # An alert is TLS too.
            return "ALERT" in (error.reason or "")
        except OSError:
            return False
    return True


def _answer_to_http2(address: str) -> bytes | None:
    """The head of its first frame, nothing when it hangs up, None when it says nothing."""
    with _connected(address) as plain:
        try:
            plain.sendall(HTTP2_HELLO)
            return plain.recv(9)
        except TimeoutError:
            return None
        except OSError:
            return b""


def _connected(address: str) -> socket.socket:
    """Raises OSError where nobody listens, ValueError for an address that is neither host:port nor a Unix socket."""
    if not is_unix(address):
        host, port = split(address)
        return socket.create_connection((host, int(port)), LOOK_SECONDS)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(LOOK_SECONDS)
    try:
        connection.connect(unix_path(address))
    except OSError:
        connection.close()
        raise
    return connection
