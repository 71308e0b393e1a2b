"""A publisher that is killed, stopped, flooded or fed with junk: its followers end with exactly what it caches."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from kvgrpc.client import EventFollower
from tests.support.event_processes import (
    FollowerProcess,
    Report,
    healed,
    publisher,
    report,
    told,
)

__all__ = ["report"]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(params=[False, True], ids=["watch", "pub"])
def live(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.slow
async def test_a_publisher_that_is_killed_and_started_again(live: bool, report: Report) -> None:
    with publisher() as source:
        async with EventFollower(source.address, live=live) as follower:
            await healed(follower, *await told(source, "serve 300"))
            source.kill()
            await asyncio.to_thread(source.start)
            took = await healed(follower, *await told(source, "serve 120"))
            report(f"killed and started again, live={live}: exact {took:.2f} s after the last batch")


@pytest.mark.slow
async def test_a_publisher_that_is_stopped_for_longer_than_silence(live: bool, report: Report) -> None:
    with publisher() as source:
        async with EventFollower(source.address, live=live) as follower:
            await healed(follower, *await told(source, "serve 200"))
            source.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(7.0)  # the fault itself
            source.process.send_signal(signal.SIGCONT)
            took = await healed(follower, *await told(source, "serve 200"))
            report(f"stopped for 7 s, live={live}: exact {took:.2f} s after the last batch")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"hwm": 1}, {"hwm": 1, "buffer_steps": 10}], ids=str)
async def test_live_events_that_are_dropped_on_the_way(
    settings: dict[str, int], report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgrpc.client.following.live.RECEIVED_FRAMES", 10)
    with publisher(**settings) as source:
        async with EventFollower(source.address, live=True) as follower:
            await healed(follower, *await told(source, "serve 50"))
            source.ask("fill 1000")  # holds this loop
            took = await healed(follower, *await told(source, "flood 900"))
            report(f"flooded with {settings}: exact {took:.2f} s after the last batch, {follower.counts}")
            assert follower.counts.gaps > 0
            if "buffer_steps" in settings:
                assert follower.counts.snapshots > 1, "the journal moved on past what was lost"


@pytest.mark.slow
async def test_junk_among_the_batches(live: bool, report: Report) -> None:
    with publisher() as source:
        async with EventFollower(source.address, live=live) as follower:
            await healed(follower, *await told(source, "serve 100"))
            assert await asyncio.to_thread(source.ask, "junk") == "published"
            took = await healed(follower, *await told(source, "restate"))
            report(f"junk, live={live}: exact {took:.2f} s after it was stated again")


@pytest.mark.slow
async def test_a_follower_whose_loop_is_held_while_the_log_runs_away(
    live: bool, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgrpc.client.following.live.RECEIVED_FRAMES", 10)
    with publisher(buffer_steps=20, hwm=1) as source:
        async with EventFollower(source.address, live=live) as follower:
            await healed(follower, *await told(source, "serve 50"))
            source.ask("serve 300")  # holds this loop
            state = source.ask("fill 1000")
            content, next_sequence = {medium: set(hashes) for medium, hashes in state[0].items()}, state[1]
            took = await healed(follower, content, next_sequence)
            report(f"held, live={live}: exact after {took:.2f} s, {follower.counts.snapshots} snapshots")
            assert follower.counts.snapshots > 1, "the journal moved on past where it was held"


@pytest.mark.slow
def test_a_follower_process_that_is_stopped_under_load(live: bool, report: Report) -> None:
    with publisher(buffer_steps=20) as source, FollowerProcess(source.address, live) as follower:
        content, upcoming = source.ask("serve 50")
        assert follower.shown(upcoming)[0] == {medium: set(hashes) for medium, hashes in content.items()}
        follower.process.send_signal(signal.SIGSTOP)
        content, upcoming = source.ask("serve 300")
        follower.process.send_signal(signal.SIGCONT)
        began = time.monotonic()
        shown, counts = follower.shown(upcoming)
        report(f"follower stopped, live={live}: exact {time.monotonic() - began:.2f} s after it goes on, {counts}")
        assert shown == {medium: set(hashes) for medium, hashes in content.items()}
        assert counts["digests_different"] == 0


@pytest.mark.slow
def test_a_follower_process_that_is_killed_and_started_again(live: bool, report: Report) -> None:
    with publisher(buffer_steps=20) as source:
        with FollowerProcess(source.address, live) as killed:
            _, upcoming = source.ask("serve 100")
            killed.shown(upcoming)
            killed.process.kill()
        content, upcoming = source.ask("serve 200")
        began = time.monotonic()
        with FollowerProcess(source.address, live) as follower:
            shown, counts = follower.shown(upcoming)
            took = time.monotonic() - began
            report(f"follower killed, live={live}: the next one is exact {took:.2f} s after its start")
        assert shown == {medium: set(hashes) for medium, hashes in content.items()}
        assert counts["snapshots"] == 1  # the journal does not reach back
