"""Whatever breaks, a follower shows a state that the cache had, and ends with the one it has."""

from __future__ import annotations

import pytest

from kvgrpc.events.following.messages import FollowerState
from kvgrpc.events.model import BlockStored
from tests.simulation.followers import CALM, HEARTBEAT_STEPS, Faults, World

STEPS = 1000
# Beyond the longest pause of 5 s, a snapshot and two heartbeats.
SETTLE_STEPS = 1200
SHAPES = [(live, snapshots) for live in (False, True) for snapshots in (True, False)]


def check(seed: int, live: bool, snapshots: bool) -> World:
    world = World(seed, Faults(), live=live, snapshots=snapshots)
    for _ in range(STEPS):
        world.step()
        assert world.is_exact(), f"seed {seed}: not a state of the cache at step {world.steps}"
    assert world.settle(SETTLE_STEPS), f"seed {seed}: {world.core.state}, lag {world.core.lag}"
    assert world.is_exact(), f"seed {seed}"
    return world


@pytest.mark.parametrize(("live", "snapshots"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_a_follower_is_exact_all_the_way(seed: int, live: bool, snapshots: bool) -> None:
    check(seed, live, snapshots)


@pytest.mark.slow
@pytest.mark.parametrize(("live", "snapshots"), SHAPES)
@pytest.mark.parametrize("twenty", range(5))
def test_a_follower_is_exact_all_the_way_in_many_worlds(twenty: int, live: bool, snapshots: bool) -> None:
    for seed in range(1000 + 20 * twenty, 1020 + 20 * twenty):
        check(seed, live, snapshots)


def test_the_faults_happen() -> None:
    worlds = [check(seed, True, True) for seed in range(4)]
    for name in ("batches", "gaps", "replays", "snapshots", "new_logs", "digests_equal", "failures"):
        assert sum(getattr(world.core.counts, name) for world in worlds) > 0, name
    assert sum(world.core.counts.digests_different for world in worlds) == 0


@pytest.mark.parametrize("seed", range(3))
def test_batches_that_are_not_what_was_published_are_found_by_the_digest(seed: int) -> None:
    world = World(seed, CALM, live=True, snapshots=True)
    world.run(100)
    for block in range(3):
        world.server.append([BlockStored([20 + block], None, [], 16)])
        wrong = world.server.append([BlockStored([block], None, [], 16)])
        world.server.said[wrong + b"!"] = [BlockStored([10 + block], None, [], 16)]
        end = len(world.server.log.entries)
        world.pub.extend([(end - 2, world.server.log.entries[end - 2] or b""), (end - 1, wrong + b"!")])
        assert world.settle(SETTLE_STEPS)
        world.run(SETTLE_STEPS)
        assert world.core.state is FollowerState.CURRENT
        assert world.is_exact(), f"seed {seed}"
    assert world.core.counts.digests_different > 0


def test_a_batch_that_cannot_be_read_is_not_shown_as_if_it_had_been() -> None:
    world = World(1, CALM, live=True, snapshots=True)
    world.run(300)
    world.server.append([BlockStored([1], None, [], 16)])
    world.pub.append((len(world.server.log.entries) - 1, b"junk"))
    assert world.settle(SETTLE_STEPS)
    assert world.is_exact()
    assert world.core.counts.undecodable == 1


def test_a_lost_end_is_read_again_after_two_heartbeats() -> None:
    world = World(1, CALM, live=True, snapshots=True)
    world.run(300)
    assert world.core.state is FollowerState.CURRENT
    world.server.append([BlockStored([1], None, [], 16)])
    world.run(3 * HEARTBEAT_STEPS)
    assert world.core.next_sequence == len(world.server.log.entries)
    assert world.core.counts.replays == 1
    assert world.core.counts.failures == 0


@pytest.mark.parametrize("live", [False, True])
def test_without_faults_nothing_is_read_twice(live: bool) -> None:
    world = World(1, Faults(0.3, 0, 0, 0, 0, 0, 0, 0.95), live=live, snapshots=True)
    world.run(STEPS)
    assert world.settle(SETTLE_STEPS)
    assert world.core.counts.snapshots == 1
    assert world.core.counts.failures == 0


def test_an_engine_that_is_gone_is_not_shown_for_ever() -> None:
    world, held = World(1, CALM, live=False, snapshots=True), 7
    world.server.append([BlockStored([held], None, [], 16)])
    assert world.settle(SETTLE_STEPS)
    assert world.index.score([held])
    world.server.away_until = 10**9
    world.run(100)
    assert world.index.score([held])
    world.run(2000)
    assert world.index.score([held]) == {}
    world.server.away_until = 0
    assert world.settle(SETTLE_STEPS)
    assert world.index.score([held])
    assert world.core.counts.snapshots == 1


def test_a_stopped_follower_leaves_the_index() -> None:
    world = World(1, CALM, live=False, snapshots=True)
    world.server.append([BlockStored([7], None, [], 16)])
    assert world.settle(SETTLE_STEPS)
    assert world.index.score([7])
    world.core.stop()
    world.obey()
    assert world.watches == {}
    assert world.index.score([7]) == {}
