"""Moves bytes between ranks: ``base`` is the interface of ``shm`` (one host) and ``mooncake`` (RDMA, TCP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgrpc.dataplane.base import DataPlane

__all__ = ["NAMES", "open_plane"]


NAMES = ("mooncake", "shm")


def open_plane(name: str, *, host: str = "127.0.0.1", device: str = "") -> DataPlane:
    """Opens a data plane. ``host``: where peers reach this process; ``device``: "", "tcp", or names of RDMA adapters.

    Both are ignored by "shm". Loads only what that plane needs. Raises ValueError for an unknown name, and
    FeatureDisabled with the remedy where a package or a library is missing.
    """
    if name == "shm":
        from kvgrpc.dataplane.shm.plane import ShmDataPlane

        return ShmDataPlane()
    if name == "mooncake":
        from kvgrpc.dataplane.mooncake.plane import MooncakeDataPlane

        return MooncakeDataPlane(host, device)
    raise ValueError(f"unknown data plane {name!r}: choose one of {', '.join(NAMES)}")
