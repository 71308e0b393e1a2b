"""Two real vLLM engines over Mooncake, of which the taker was there first; the holder stops and goes on."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.server import RegistryServer
from tests.engines.model import Reference
from tests.engines.vllm_engine import BLOCK
from tests.engines.vllm_pulling import address, chunks_at, compute, has, opened, pulled
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
# Seconds for which a holder may be silent.
PATIENCE = 5.0


def test_a_holder_that_came_later_lends_over_mooncake_and_a_stop_of_it_costs_a_computed_prompt(
    folder: Path, reference: Reference
) -> None:
    pytest.importorskip("mooncake")
    registry = RegistryServer(["127.0.0.1:0"]).open()
    settings: dict[str, Any] = {"data_plane": "mooncake", "patience": PATIENCE}
    engines = []
    try:
        for name in ("second", "first"):
            engines.append(opened(name, folder, reference.path, registry.address, **settings))
            engines[-1].wait_ready()
        taker, holder = engines
        one, two, three = (reference.case(6 * BLOCK + 3) for _ in range(3))
        with SyncClient(address(registry.address, "second")) as client:
            for case in (one, two):
                assert compute(holder, case) == 0
                wait_until(partial(has, client, case, 6))
            before = pulled(client)
            assert compute(taker, one) == 6 * BLOCK
            assert pulled(client) - before == 6
            holder.stop()
            began = time.monotonic()
            assert compute(taker, two) == 0
            took = time.monotonic() - began
            print(f"computed after {took:.2f} s, the holder stopped, which may be silent for {PATIENCE:g} s")
            assert took < 3 * PATIENCE + 30.0
            holder.go_on()
            assert compute(holder, three) == 0
            wait_until(lambda: chunks_at(client, three) == 6)
            assert compute(taker, three) == 6 * BLOCK
        assert taker.is_empty() and holder.is_empty()
    finally:
        for engine in engines:
            engine.close()
        registry.close()
