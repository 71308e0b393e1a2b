"""What several suites of processes and faults need."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import link as network
from tests.support.copying import copies
from tests.support.etcd_replicas import etcd, replicas
from tests.support.pairs import data_plane, pair, start

__all__ = ["copies", "data_plane", "etcd", "pair", "replicas", "start"]

MOUNT_SECONDS = 20.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small tmpfs")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=MOUNT_SECONDS)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True, timeout=MOUNT_SECONDS)


@pytest.fixture
def link() -> Iterator[network.Link]:
    """A network that can be cut."""
    if network.missing():
        pytest.skip(network.missing())
    try:
        made = network.Link()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.remove()
