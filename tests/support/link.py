"""A network that a test can cut: a second network namespace and the link to it. Root, and the command ip, make it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess

IP_SECONDS = 20.0
_CLONE_NEWNET = 0x4000_0000


def missing() -> str:
    """Why there can be no link here; "" where there can."""
    return "" if os.geteuid() == 0 and shutil.which("ip") else "network namespaces need root and the command ip"


class Link:
    """A pair of virtual Ethernet devices: one end here (``own``), the other one (``host``) in the namespace ``name``.

    Raises OSError where there may be none.
    """

    def __init__(self) -> None:
        self.name = f"kvgrpc{os.getpid()}"
        self._here, self._there = f"kvg{os.getpid()}a", f"kvg{os.getpid()}b"
        # Whose tests run beside these has another process id, and so other addresses of 10.128.0.0/10.
        subnet = (10 << 24) + (128 << 16) + 4 * (os.getpid() % (1 << 20))
        self._net, self.own, self.host = (".".join(map(str, (subnet + last).to_bytes(4, "big"))) for last in range(3))
        # Without the link nothing may leave by the machine's own network, where somebody could answer.
        self._guard = ("unreachable", f"{self._net}/30", "metric", "4096")
        ip("netns", "add", self.name)
        try:
            ip("route", "add", *self._guard)
            ip("link", "add", self._here, "type", "veth", "peer", "name", self._there, "netns", self.name)
            ip("addr", "add", f"{self.own}/30", "dev", self._here)
            ip("-n", self.name, "addr", "add", f"{self.host}/30", "dev", self._there)
            ip("-n", self.name, "link", "set", "lo", "up")  # whoever lives there dials itself too
            ip("link", "set", self._here, "up")
            self.mend()
        except BaseException:
            self.remove()
            raise

    def device(self, *, here: bool = True) -> str:
        """The name of one end."""
        return self._here if here else self._there

    def cut(self) -> None:
        """The far end goes down: what is sent is lost and nobody is told, as with a cable that is pulled."""
        ip("-n", self.name, "link", "set", self._there, "down")

    def mend(self) -> None:
        ip("-n", self.name, "link", "set", self._there, "up")

    def remove(self) -> None:
        # A namespace takes its devices with it some time later, and the next link has the same names.
        with contextlib.suppress(OSError):
            ip("link", "del", self._here)
        ip("netns", "del", self.name)
        with contextlib.suppress(OSError):
            ip("route", "del", *self._guard)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=IP_SECONDS)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def enter(name: str) -> None:
    """Moves this process into a namespace, before it opens a socket or starts a thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")
