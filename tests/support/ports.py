"""Ports that nobody listens at."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One of this host, which another process may take before the caller does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
