"""An engine that Mooncake's start takes for a real one, with the ports that it listens on."""

from __future__ import annotations

import os

import pytest

from kvgrpc.dataplane.mooncake import start as mooncake_start
from kvgrpc.dataplane.mooncake.environment import DEFAULTS
from kvgrpc.dataplane.mooncake.start import StartedEngine, start_engine


class FakeEngine:
    """Opens a "data port" when it is initialised over TCP, as the real one does."""

    topology = "{}"
    opens: frozenset[int] = frozenset({15001, 15002})
    code = 0
    made: FakeEngine

    def __init__(self) -> None:
        FakeEngine.made = self
        self.environment: dict[str, str] = {}

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        self.arguments = (host, metadata, protocol, device)
        self.environment = dict(os.environ)
        ports.update(self.opens)
        return self.code

    def get_rpc_port(self) -> int:
        return 15001

    def get_local_topology(self) -> str:
        return self.topology

    def register_memory(self) -> int:
        """register_memory(self, address, capacity, location="*")"""
        return 0

    def transfer_submit_write(self) -> int:
        return 0

    def transfer_check_status(self) -> int:
        return 1


ports: set[int] = set()


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    ports.clear()
    ports.add(15999)  # somebody else's, listening before
    for name in list(os.environ):
        if name.startswith("MC_"):
            monkeypatch.delenv(name)
    for name in (*DEFAULTS, "MC_USE_IPV6", "MC_LOG_DIR"):
        monkeypatch.setenv(name, "")  # remembered, so that what the code sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(mooncake_start, "_listening", lambda: frozenset(ports))
    monkeypatch.setattr(mooncake_start, "_has_adapters", lambda: True)


def start(engine: type[FakeEngine] = FakeEngine, host: str = "127.0.0.1", device: str = "") -> StartedEngine:
    return start_engine(lambda: engine, host, device)
