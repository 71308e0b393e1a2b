"""The router of the soak: gives out rooms, cancels some, kills and stops ranks, and believes only what it counted."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgrpc.dataplane.base import Outcome
from kvgrpc.registry.model import DEFAULT_TTL
from tests.soak import rank as rank_process
from tests.soak.node import Engine, Node
from tests.soak.orders import (
    HEADS,
    LARGEST_ROOM,
    PAGES,
    ROOM_SECONDS,
    SOUND_PAGES,
    Disturbed,
    Ended,
    Fault,
    LateWrite,
    Measure,
    OpenRank,
    Receive,
    Resources,
    Send,
    heads_of,
)
from tests.soak.verdict import KILLED, Plan, Result, Room
from tests.support.ports import free_port

OPEN_SECONDS = 150.0  # seven processes, on a busy machine
IDLE_SECONDS = 30.0
# Past a room's own deadline, which does not age while its processes get no turn: what is not over by then is lost.
OVERDUE_SECONDS = ROOM_SECONDS + 40.0
# Rooms in flight and ranks that start hold up the next room for less than this.
STUCK_SECONDS = OPEN_SECONDS + OVERDUE_SECONDS
CANCELLED_SHARE = 0.1
LONGEST_CANCEL = 0.02
# Two kills, then a stop, after which its rooms go on, or which is long enough to lose them (4 s).
STOPPED_EVERY = 3
SHORTEST_STOP, LONGEST_STOP = 0.3, 7.0
# Seconds within which a rank that goes on after a stop has read from its connections who died meanwhile.
HEARS_WITHIN = 1.0
# What MC_TCP_LANES_PER_PEER is by default.
MOONCAKE_LANES = 4
# Before that connections are still being made.
FLAT_FROM_ROOMS = 300


@dataclass(frozen=True)
class Unaware:
    """A rank that has just gone on after a stop in which others were killed: its connections to them still seem to
    stand, so that it may send a room to one that is dead. That costs the room, and the successor never hears of it."""

    node: Node
    killed: frozenset[Node]
    until: float

    def may_send_to_the_dead(self, prefill: Engine, decode: Engine, now: float) -> bool:
        return now < self.until and self.node in decode.nodes and not self.killed.isdisjoint(prefill.nodes)


class Router:
    """Two prefill and two decode engines, of each one with tp 1 and one with tp 2, and any of these with any of those.

    ``logs``: a folder for what processes say. ``watch(result, open rooms)``: called often, for a progress bar.
    """

    def __init__(self, plan: Plan, logs: Path, watch: Callable[[Result, int], None]) -> None:
        self.plan = plan
        self._logs = logs
        self.result = Result(plan)
        self._watch = watch
        self._draw = random.Random(plan.seed)
        self._rooms: dict[int, Room] = {}
        self._seeds: dict[str, int] = {}
        self._next_seed = itertools.count(1)
        self._measured: dict[str, list[Resources]] = {}
        self._stopped: tuple[Node, float] | None = None
        self._killed_meanwhile: set[Node] = set()
        self._unaware: Unaware | None = None
        self._registry_until = 0.0  # it is away, or knows only some of the ranks
        self._address = f"127.0.0.1:{free_port()}"
        self._registry = Node("registry", logs / "registry", rank_process.serve_registry, lambda: (self._address,))
        self._prefills = [self._engine("P1", "PREFILL", 1), self._engine("P2", "PREFILL", 2)]
        self._decodes = [self._engine("D1", "DECODE", 1), self._engine("D2", "DECODE", 2)]
        self._ranks = [node for engine in (*self._prefills, *self._decodes) for node in engine.nodes]
        # One of each role lives on, beside a neighbour that does not: what it holds must stay flat.
        self._keepers = [self._prefills[1].nodes[0], self._decodes[1].nodes[0]]
        self._victims = [self._registry, *(node for node in self._ranks if node not in self._keepers)]

    def run(self) -> Result:
        try:
            if self._until(self._all_open, OPEN_SECONDS, "not all ranks opened"):
                began = time.monotonic()
                self._soak()
                self._wind_up()
                self.result.seconds = time.monotonic() - began
        finally:
            for node in (self._registry, *self._ranks):
                node.kill()
        return self.result

    def _soak(self) -> None:
        plan, began = self.plan, time.monotonic()
        kill_at, measured = began + plan.kill_every, False
        self._registry_until = 0.0  # all ranks are there
        pause = plan.seconds / plan.rooms
        next_room = began
        last_room, number = began, 0
        while self.result.rooms < plan.rooms:
            self._listen()
            now = time.monotonic()
            if self.result.rooms > number:
                last_room, number = now, self.result.rooms
            elif now - last_room > STUCK_SECONDS:
                self.result.problems.append(f"no room could be given out for {STUCK_SECONDS:.0f} s, after {number}")
                break
            if now >= kill_at and self._disturb_somebody(now):
                kill_at = now + plan.kill_every
            if not measured and self.result.rooms > plan.rooms // 3:
                self._measure()
                measured = True
            if now >= next_room and len(self._rooms) < plan.in_flight:
                next_room = max(next_room + pause, now - 1.0)
                self._start_room(now)
            else:
                time.sleep(0.001)
        self.result.check_disturbances(time.monotonic() - began)
        self._go_on()

    def _wind_up(self) -> None:
        """What must hold after the last room, as soon as that is over."""
        self._until(lambda: not self._rooms, OVERDUE_SECONDS, "rooms did not end")
        if self.plan.unknown_share:
            self._kill_who_may_still_write()
        self._until(self._all_open, OPEN_SECONDS, "not all ranks opened again")
        if not self._until(self._is_idle, IDLE_SECONDS, f"not idle {IDLE_SECONDS:.0f} s after the last room"):
            self.result.problems += [f"{node.name}: {self._measured.get(node.name, [])[-1:]}" for node in self._ranks]
        self.result.check_share()
        self.result.check_late_writes()
        self.result.check_outcomes()
        if self.plan.rooms >= FLAT_FROM_ROOMS:
            self._compare_resources()

    def _start_room(self, now: float) -> None:
        """None where a role has no open engine."""
        draw = self._draw
        prefills, decodes = ([one for one in each if one.is_open] for each in (self._prefills, self._decodes))
        if not (prefills and decodes):
            return
        prefill, decode = draw.choice(prefills), draw.choice(decodes)
        self.result.rooms += 1
        number = self.result.rooms
        count = min(LARGEST_ROOM, 1 + int(draw.expovariate(1 / 12)))
        pages = draw.sample(range(SOUND_PAGES), count)
        fault = self._draw_fault(prefill)
        if fault is not None:
            pages[draw.randrange(count)] = fault.page
            self.result.injected += 1
        cancels = self._draw_cancel(prefill, decode)
        room = self._rooms[number] = Room(number, prefill, decode, now, count, bool(cancels), fault)
        room.disturbed = self._unaware is not None and self._unaware.may_send_to_the_dead(prefill, decode, now)
        room.unanswered = now < self._registry_until
        chunk = draw.choice([count, 5])
        seeds = [self._seeds[node.name] for node in prefill.nodes for _ in heads_of(0, prefill.tp)]
        bootstrap = f"{self._address}/{prefill.name}"
        orders: list[tuple[Node, Send | Receive]] = [
            *((node, Send(number, pages, chunk, cancels.get(node.name))) for node in prefill.nodes),
            *((node, Receive(number, bootstrap, seeds, pages, cancels.get(node.name))) for node in decode.nodes),
        ]
        for node, order in draw.sample(orders, len(orders)):
            node.order(order)

    def _draw_fault(self, prefill: Engine) -> Fault | None:
        """Unknown ones only at ranks that are killed at last: decode holds their pages until then."""
        draw = self._draw
        if draw.random() >= self.plan.fault_rate:
            return None
        unknown = draw.random() < self.plan.unknown_share
        tp = draw.randrange(prefill.tp)
        if unknown and prefill.nodes[tp] not in self._keepers:
            outcome = Outcome.FAILED_UNKNOWN
        else:
            outcome = draw.choice([Outcome.REJECTED, Outcome.FAILED_SRC_FREE])
        return Fault(outcome, tp)

    def _draw_cancel(self, prefill: Engine, decode: Engine) -> dict[str, float]:
        """After how many seconds which ranks give the room up: all of an engine, as a router tells them, or one."""
        draw = self._draw
        if draw.random() >= CANCELLED_SHARE:
            return {}
        nodes = draw.choice([prefill, decode]).nodes
        chosen = nodes if draw.random() < 0.5 else [draw.choice(nodes)]
        after = draw.uniform(0, LONGEST_CANCEL)
        return {node.name: after for node in chosen}

    def _listen(self) -> None:
        for node in (self._registry, *self._ranks):
            for said in node.receive():
                if isinstance(said, Ended):
                    self._note(node, said)
                elif isinstance(said, LateWrite):
                    self.result.late_writes[said.outcome] += 1
                elif isinstance(said, Resources):
                    self._measured.setdefault(node.name, []).append(said)
            if not node.process.is_alive():
                self.result.problems.append(f"{node.name} ended by itself, exit code {node.process.exitcode}")
                self._restart(node)
        if not self._registry.is_open:
            self._registry_until = time.monotonic() + DEFAULT_TTL
        if self._stopped is not None and time.monotonic() > self._stopped[1]:
            self._go_on()
        overdue = [room for room in self._rooms.values() if time.monotonic() - room.began > OVERDUE_SECONDS]
        for room in overdue:
            self.result.problems.append(f"room {room.number} did not end: {room}")
            del self._rooms[room.number]
        self._watch(self.result, len(self._rooms))

    def _note(self, node: Node, said: Ended) -> None:
        if said.wrong:
            self.result.problems.append(f"room {said.room} at {node.name}: {said.wrong}")
        room = self._rooms.get(said.room)
        if room is not None:
            room.ended[node.name] = said
            self._settle(room)

    def _settle(self, room: Room) -> None:
        if room.is_over:
            self.result.settle(self._rooms.pop(room.number))

    def _disturb_somebody(self, now: float) -> bool:
        """False where nobody can be spared, or the last one that was stopped still is."""
        victims = [node for node in self._victims if self._can_be_spared(node)]
        stop = (self.result.kills.total() + self.result.stops.total()) % STOPPED_EVERY == STOPPED_EVERY - 1
        if not victims or (stop and self._stopped is not None):
            return False
        victim = self._draw.choice(victims)
        if stop:
            self.result.stops[victim.name] += 1
            self._killed_meanwhile.clear()
            self._stopped = victim, now + self._draw.uniform(SHORTEST_STOP, LONGEST_STOP)
            victim.stop()
            self._mark_disturbed(victim)
        else:
            self.result.kills[victim.name] += 1
            self._kill(victim)
        return True

    def _can_be_spared(self, node: Node) -> bool:
        """It is there, and its role has another engine for new rooms meanwhile; the registry while no rank starts."""
        if node is self._registry:
            return self._all_open()
        others = [
            engine.is_open
            for engines in (self._prefills, self._decodes)
            if any(node in engine.nodes for engine in engines)
            for engine in engines
            if node not in engine.nodes
        ]
        return node.is_open and all(others)

    def _mark_disturbed(self, node: Node) -> list[Room]:
        """The rooms that had a part there. The registry has none: it only leaves questions unanswered."""
        if node is self._registry:
            self._registry_until = time.monotonic() + DEFAULT_TTL
            for room in self._rooms.values():
                room.unanswered = True
        rooms = [room for room in self._rooms.values() if node in (*room.prefill.nodes, *room.decode.nodes)]
        for room in rooms:
            room.disturbed = True
        for other in {other for room in rooms for other in (*room.prefill.nodes, *room.decode.nodes)}:
            other.order(Disturbed([room.number for room in rooms]))
        return rooms

    def _go_on(self) -> None:
        if self._stopped is not None:
            node = self._stopped[0]
            self._unaware = Unaware(node, frozenset(self._killed_meanwhile), time.monotonic() + HEARS_WITHIN)
            node.go_on()
            self._stopped = None

    def _kill(self, victim: Node) -> None:
        victim.kill()
        self._restart(victim)

    def _kill_who_may_still_write(self) -> None:
        """Their death is the evidence that pages wait for which were written to nobody knows how far."""
        for node in self._victims:
            if any(node in engine.nodes for engine in self._prefills):
                self._kill(node)

    def _restart(self, node: Node) -> None:
        """Its part of its rooms ended with it."""
        if self._stopped is not None:
            self._killed_meanwhile.add(node)
        for room in self._mark_disturbed(node):
            room.ended.setdefault(node.name, Ended(room.number, KILLED, 0.0))
            self._settle(room)
        node.start()

    def _engine(self, name: str, role: str, tp_size: int) -> Engine:
        def node(tp: int) -> Node:
            rank = f"{name}.{tp}"

            def arguments() -> tuple[Any, ...]:
                seed = self._seeds[rank] = next(self._next_seed)
                return (OpenRank(name, role, tp, tp_size, self._address, seed, self.plan.data_plane),)

            return Node(rank, self._logs / rank, rank_process.serve_rank, arguments)

        assert HEADS % tp_size == 0
        return Engine(name, role, [node(tp) for tp in range(tp_size)])

    def _all_open(self) -> bool:
        return all(node.is_open for node in (self._registry, *self._ranks))

    def _is_idle(self) -> bool:
        """Whether no rank has an open room or write, and every page came home as nobody had written to it."""
        last = self._measure_now(self._ranks)
        decode = {node.name for engine in self._decodes for node in engine.nodes}
        for node, one in zip(self._ranks, last, strict=False):
            if one.spoiled_pages:
                self.result.problems.append(f"{node.name}: {one.spoiled_pages} free pages were written")
                return True
        return bool(last) and all(
            (one.open_rooms, one.open_writes, one.held_pages) == (0, 0, 0)
            and (one.free_pages == PAGES or node.name not in decode)
            for node, one in zip(self._ranks, last, strict=True)
        )

    def _measure(self) -> None:
        for node in self._keepers:
            node.order(Measure())

    def _measure_now(self, nodes: list[Node]) -> list[Resources]:
        """Empty where one of them does not answer."""
        before = {node.name: len(self._measured.get(node.name, [])) for node in nodes}
        for node in nodes:
            node.order(Measure())
        end = time.monotonic() + 5.0
        while any(len(self._measured.get(name, [])) == seen for name, seen in before.items()):
            if time.monotonic() > end:
                return []
            self._listen()
            time.sleep(0.01)
        return [self._measured[node.name][-1] for node in nodes]

    def _compare_resources(self) -> None:
        """Of the two ranks that nobody killed: a third of the way, and now."""
        if not self._measure_now(self._keepers):
            self.result.problems.append("no measurement")
            return
        for name in (node.name for node in self._keepers):
            first, last = self._measured[name][0], self._measured[name][-1]
            self.result.resources[name] = first, last
            grown = last.resident - first.resident
            if grown > 0.1 * first.resident + 16 * 2**20:
                self.result.problems.append(f"{name} grew by {grown / 2**20:.0f} MiB")
            if last.threads > first.threads + 2 or last.descriptors > first.descriptors + self._descriptors_allowed():
                self.result.problems.append(f"{name}: threads or descriptors grew: {first} -> {last}")

    def _descriptors_allowed(self) -> int:
        """Mooncake keeps its connections to a peer that was killed (as many as it has lanes) until its engine ends."""
        kills = sum(number for name, number in self.result.kills.items() if name != self._registry.name)
        return 8 + (MOONCAKE_LANES * kills if self.plan.data_plane == "mooncake" else 0)

    def _until(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            self._listen()
            if time.monotonic() > end:
                self.result.problems.append(f"{otherwise}: {list(self._rooms.values())[:3]}")
                return False
            time.sleep(0.005)
        return True
