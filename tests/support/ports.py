"""Ports that nobody listens at."""

from __future__ import annotations

import random
import socket

# Below those that Linux gives to whoever asks for any (`ip_local_port_range`), which could be taken before their caller
# listens: an engine needs seconds for that.
_PORTS = range(20_000, 32_000)
_RANDOM = random.SystemRandom()  # so that processes with the same seed choose others


def free_port() -> int:
    """One of this host that nobody listens at."""
    while True:
        port = _RANDOM.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
