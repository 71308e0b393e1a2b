"""An engine that holds its interpreter for 10 s while requests are at every stage of their hand-off loses none.

Both engines are asked the same; test_sglang_held_interpreter.py and test_vllm_held_interpreter.py run it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from kvgrpc.client import SyncClient
from kvgrpc.v1 import transfer_service_pb2 as proto
from tests.engines.engine import ROOT, Engine, Pair
from tests.engines.model import Reference
from tests.engines.stages import LONG, Asked, Stages, rank_address, stop_at_every_stage
from tests.support.waiting import wait_until

HELD_SECONDS = 10.0
# Of engines that can be held: ``holding`` has what each of their processes does at its start.
HOLDABLE: Mapping[str, str] = {
    "PYTHONPATH": f"{Path(__file__).parent / 'holding'}{os.pathsep}{ROOT}",
    "HELD_SECONDS": str(HELD_SECONDS),
}


def hold_at_every_stage(pair: Pair, reference: Reference, role: str) -> None:
    """The requests of ``Stages``, those that the other side hears of meanwhile, and one that comes meanwhile."""
    pair.check(reference)
    held: Engine = getattr(pair, role)
    awake = pair.decode if held is pair.prefill else pair.prefill
    now = stop_at_every_stage(pair, reference, role)
    began = _hold(held)
    with SyncClient(rank_address(awake)) as client:
        _wait_for_session(client, proto.SESSION_STATE_SILENT)
        _ask_the_rest(now)
        late = Asked(pair, reference.case(100), pair.room())
        late.ask_prefill()
        late.ask_decode()
        _wait_for_session(client, proto.SESSION_STATE_OPEN)
    silent = time.monotonic() - began
    assert silent > HELD_SECONDS - 0.5, f"it was held for {silent:.2f} s only"
    for asked in (now.alone, now.early, now.under_way, late):
        _ended_well(asked)
    assert now.computing.decode is not None and now.computing.prefill is not None
    computed = now.computing.decode.result()
    assert (computed[: len(now.computing.case.tokens)], len(computed)) == (now.computing.case.tokens, LONG)
    assert now.computing.prefill.result() == now.computing.case.tokens[:1]
    for engine in (held, awake):
        assert engine.alive and "PEER_LOST" not in engine.log(), engine.log_tail()
    print(f"{role}: heard of again {silent:.1f} s after its interpreter was held; no request failed")
    pair.check(reference)
    assert held.is_empty() and awake.is_empty()


def _hold(stopped: Engine) -> float:
    """Each of its interpreters, from when they go on: the signal waits for them. The moment."""
    for pid in stopped.pids():
        if _catches(pid, signal.SIGUSR2):  # others it would end: a compiler, say
            os.kill(pid, signal.SIGUSR2)
    moment = time.monotonic()
    stopped.go_on()
    return moment


def _catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _wait_for_session(client: SyncClient, state: proto.SessionState.ValueType) -> None:
    """Until the one session that the rank has is so."""
    wait_until(lambda: [session.state for session in client.list_sessions()] == [state])


def _ask_the_rest(now: Stages) -> None:
    """The halves that nobody had asked for yet."""
    now.alone.ask_prefill()
    now.early.ask_decode()


def _ended_well(asked: Asked) -> None:
    assert asked.prefill is not None and asked.decode is not None
    assert asked.decode.result() == asked.case.tokens
    assert asked.prefill.result() == asked.case.tokens[:1]
