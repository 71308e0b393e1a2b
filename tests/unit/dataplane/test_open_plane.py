"""Planes are opened by name, and what is missing is said with the remedy."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvgrpc.dataplane import open_plane
from kvgrpc.dataplane.mooncake import plane as mooncake
from kvgrpc.errors import FeatureDisabled


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'tcp'.*mooncake, shm"):
        open_plane("tcp")


@pytest.mark.parametrize(("transport", "pays"), [("tcp", True), ("rdma", False)])
def test_mooncake_says_that_gathering_pays_where_each_write_costs(transport: str, pays: bool) -> None:
    plane = mooncake.MooncakeDataPlane.__new__(mooncake.MooncakeDataPlane)  # no engine is needed to say it
    plane.transport = transport
    assert plane.gathers_slices is pays


def test_the_package_loads_no_plane() -> None:
    script = (
        "import sys, kvgrpc.dataplane\n"
        "assert not {'numpy', 'mooncake', 'kvgrpc.dataplane.shm', 'kvgrpc.dataplane.mooncake'} & set(sys.modules)\n"
        "kvgrpc.dataplane.open_plane('shm').close(1.0)\n"
        "assert 'mooncake' not in sys.modules and 'kvgrpc.dataplane.mooncake' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=50)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(FeatureDisabled, match=r"kvgrpc\[mooncake-cpu\]"):
        open_plane("mooncake")


def test_a_missing_library_names_the_packages_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> type[object]:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(mooncake, "_transfer_engine", load)
    with pytest.raises(FeatureDisabled, match=r"libibverbs\.so\.1.*apt-get install libibverbs1 libnuma1 libcurl4"):
        open_plane("mooncake")
