"""The router of the soak: gives out rooms, cancels some, kills processes, and believes only what it counted."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak import rank as rank_process
from tests.soak.orders import (
    LARGEST_ROOM,
    LAYERS,
    PAGE_BYTES,
    PAGES,
    ROOM_SECONDS,
    Ended,
    Measure,
    Opened,
    OpenRank,
    Receive,
    Resources,
    Send,
)

OPEN_SECONDS = 60.0
# Past a room's own deadline: for the tick, the peer's word and a busy machine.
OVERDUE_SECONDS = ROOM_SECONDS + 15.0
CANCELLED_SHARE = 0.1
LONGEST_CANCEL = 0.02
KILLED = "KILLED"  # the side's process was, so nobody was left to say how the room ended
# What MC_TCP_LANES_PER_PEER is by default.
MOONCAKE_LANES = 4
# Before that connections are still being made.
FLAT_FROM_ROOMS = 300
# A room whose processes all lived and that nobody cancelled may end so, and in no other way.
EXPLAINED = {"", "TRANSFER_FAILED", "PAGES_HELD"}


@dataclass(frozen=True, slots=True)
class Plan:
    """``in_flight``: rooms at once. ``kill_every``: seconds between two kills. ``fault_rate``: of all submissions,
    of which a room has one to several: about 12 % of the rooms fail by it."""

    rooms: int
    seconds: float
    in_flight: int = 24
    kill_every: float = 4.0
    fault_rate: float = 0.07
    data_plane: str = "shm"
    seed: int = 1


@dataclass
class Room:
    number: int
    prefill: str
    decode: str
    began: float
    pages: int
    cancelled: bool
    disturbed: bool = False
    at_prefill: Ended | None = None
    at_decode: Ended | None = None

    @property
    def ended(self) -> bool:
        return self.at_prefill is not None and self.at_decode is not None


@dataclass
class Result:
    """``problems``: what must never be; empty means that the soak is OK."""

    plan: Plan
    rooms: int = 0
    successes: int = 0
    bytes_checked: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    longest_room: float = 0.0
    problems: list[str] = field(default_factory=list)
    resources: dict[str, tuple[Resources, Resources]] = field(default_factory=dict)


class Node:
    """One child process, started again after each kill. Its pipe carries lists."""

    def __init__(
        self, name: str, log: Path, target: Callable[..., None], arguments: Callable[[], tuple[Any, ...]]
    ) -> None:
        self.name = name
        self.address = ""
        self._log = log
        self._target, self._arguments = target, arguments
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=self._target, args=(child, self._log, *self._arguments()), daemon=True)
        self.process.start()
        child.close()
        self.is_open = False

    def receive(self) -> Iterator[object]:
        """What it said since; nothing once it is dead."""
        try:
            while self.pipe.poll(0):
                for said in self.pipe.recv():
                    if isinstance(said, Opened):
                        self.address, self.is_open = said.address, True
                    yield said
        except (EOFError, ConnectionError):
            self.is_open = False

    def order(self, what: object) -> None:
        try:
            self.pipe.send([what])
        except OSError:
            self.is_open = False

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10.0)
        self.pipe.close()
        self.is_open = False


class Router:
    """``logs``: a folder for what processes say. ``watch(result, open rooms)``: called often, for a progress bar."""

    def __init__(self, plan: Plan, logs: Path, watch: Callable[[Result, int], None]) -> None:
        self.plan = plan
        self._logs = logs
        self.result = Result(plan)
        self._watch = watch
        self._draw = random.Random(plan.seed)
        self._rooms: dict[int, Room] = {}
        self._seeds: dict[str, int] = {}
        self._next_seed = 1
        self._measured: dict[str, list[Resources]] = {}
        registry = f"127.0.0.1:{_free_port()}"
        self._registry = Node("registry", logs / "registry", rank_process.serve_registry, lambda: (registry,))
        self._address = registry
        # The first of each role is never killed: what it holds must stay flat, and its rooms must end well.
        self._prefills = [self._node(f"P{number}", "PREFILL") for number in range(2)]
        self._decodes = [self._node(f"D{number}", "DECODE") for number in range(2)]

    def run(self) -> Result:
        began = time.monotonic()
        try:
            self._until(lambda: all(node.is_open for node in self._nodes()), OPEN_SECONDS, "not all ranks opened")
            self._soak()
            self._until(lambda: not self._rooms, OVERDUE_SECONDS, "rooms did not end")
            self._until(self._is_idle, 30.0, "ranks were not idle 30 s after the last room")
            if self.plan.rooms >= FLAT_FROM_ROOMS:
                self._compare_resources()
        finally:
            for node in self._nodes():
                node.kill()
        self.result.seconds = time.monotonic() - began
        return self.result

    def _soak(self) -> None:
        plan, began = self.plan, time.monotonic()
        kill_at, measured = began + plan.kill_every, False
        pause = plan.seconds / plan.rooms
        next_room = began
        while self.result.rooms < plan.rooms:
            self._listen()
            now = time.monotonic()
            if now >= kill_at:
                self._kill_somebody()
                kill_at = now + plan.kill_every
            if not measured and self.result.rooms > plan.rooms // 3:
                self._measure()
                measured = True
            if now >= next_room and len(self._rooms) < plan.in_flight:
                next_room = max(next_room + pause, now - 1.0)
                self._start_room(now)
            else:
                time.sleep(0.001)

    def _start_room(self, now: float) -> None:
        draw = self._draw
        prefill, decode = draw.choice(self._prefills), draw.choice(self._decodes)
        if not (prefill.is_open and decode.is_open):
            return
        self.result.rooms += 1
        number = self.result.rooms
        count = min(LARGEST_ROOM, 1 + int(draw.expovariate(1 / 12)))
        pages = draw.sample(range(PAGES), count)
        cancel = draw.uniform(0, LONGEST_CANCEL) if draw.random() < CANCELLED_SHARE else None
        at_prefill = draw.random() < 0.5
        self._rooms[number] = Room(number, prefill.name, decode.name, now, count, cancel is not None)
        bootstrap = f"{self._address}/{prefill.name}"
        send = Send(number, pages, draw.choice([count, 5]), cancel if at_prefill else None)
        receive = Receive(number, bootstrap, self._seeds[prefill.name], pages, None if at_prefill else cancel)
        for node, order in draw.sample([(prefill, send), (decode, receive)], 2):
            node.order(order)

    def _listen(self) -> None:
        for node in (*self._prefills, *self._decodes, self._registry):
            for said in node.receive():
                if isinstance(said, Ended):
                    self._note(node, said)
                elif isinstance(said, Resources):
                    self._measured.setdefault(node.name, []).append(said)
            if not node.process.is_alive():
                self.result.problems.append(f"{node.name} ended by itself, exit code {node.process.exitcode}")
                self._restart(node)
        overdue = [room for room in self._rooms.values() if time.monotonic() - room.began > OVERDUE_SECONDS]
        for room in overdue:
            self.result.problems.append(f"room {room.number} did not end: {room}")
            del self._rooms[room.number]
        self._watch(self.result, len(self._rooms))

    def _note(self, node: Node, said: Ended) -> None:
        if said.wrong:
            self.result.problems.append(f"room {said.room} at {node.name}: {said.wrong}")
        room = self._rooms.get(said.room)
        if room is None:
            return
        if node in self._prefills:
            room.at_prefill = said
        else:
            room.at_decode = said
        if room.ended:
            self._settle(self._rooms.pop(room.number))

    def _settle(self, room: Room) -> None:
        assert room.at_prefill is not None and room.at_decode is not None
        result = self.result
        result.longest_room = max(result.longest_room, room.at_decode.seconds)
        result.reasons[room.at_decode.reason or "SUCCESS"] += 1
        if not room.at_decode.reason:
            result.successes += 1
            result.bytes_checked += room.pages * PAGE_BYTES * LAYERS
        undisturbed = not (room.cancelled or room.disturbed)
        for side, said in (("prefill", room.at_prefill), ("decode", room.at_decode)):
            if undisturbed and said.reason not in EXPLAINED:
                result.problems.append(f"room {room.number} failed {said.reason} at {side}, and nothing had happened")

    def _kill_somebody(self) -> None:
        victims = [node for node in (self._prefills[1], self._decodes[1], self._registry) if node.is_open]
        if victims:
            victim = self._draw.choice(victims)
            self.result.kills[victim.name] += 1
            victim.kill()
            self._restart(victim)

    def _restart(self, node: Node) -> None:
        """Its rooms were ended with it; every open room may have been disturbed where it is the registry."""
        for room in list(self._rooms.values()):
            died = Ended(room.number, KILLED, 0.0)
            if room.prefill == node.name:
                room.at_prefill = room.at_prefill or died
            elif room.decode == node.name:
                room.at_decode = room.at_decode or died
            elif node is not self._registry:
                continue
            room.disturbed = True
            if room.ended:
                self._settle(self._rooms.pop(room.number))
        node.start()

    def _node(self, name: str, role: str) -> Node:
        def arguments() -> tuple[Any, ...]:
            seed = self._seeds[name] = self._next_seed
            self._next_seed += 1
            plan = self.plan
            rate = plan.fault_rate if role == "PREFILL" else 0.0
            return (OpenRank(name, role, self._address, seed, plan.data_plane, rate),)

        return Node(name, self._logs / name, rank_process.serve_rank, arguments)

    def _nodes(self) -> tuple[Node, ...]:
        return (self._registry, *self._prefills, *self._decodes)

    def _is_idle(self) -> bool:
        """Whether every page came home in the ranks that live."""
        self._measured.pop("idle", None)
        before = {node.name: len(self._measured.get(node.name, [])) for node in self._decodes}
        for node in self._decodes:
            node.order(Measure())
        end = time.monotonic() + 5.0
        while any(len(self._measured.get(name, [])) == seen for name, seen in before.items()):
            if time.monotonic() > end:
                return False
            self._listen()
            time.sleep(0.01)
        last = [self._measured[node.name][-1] for node in self._decodes]
        return all(one.held_pages == 0 and one.free_pages == PAGES for one in last)

    def _measure(self) -> None:
        for node in (self._prefills[0], self._decodes[0]):
            node.order(Measure())

    def _compare_resources(self) -> None:
        """Of the two ranks that nobody killed: a third of the way, and now."""
        self._measure()
        keepers = (self._prefills[0].name, self._decodes[0].name)
        seen = {name: len(self._measured.get(name, [])) for name in keepers}
        self._until(
            lambda: all(len(self._measured.get(name, [])) > seen[name] for name in keepers), 5.0, "no measurement"
        )
        for name in keepers:
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

    def _until(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            self._listen()
            if time.monotonic() > end:
                self.result.problems.append(f"{otherwise}: {list(self._rooms.values())[:3]}")
                return
            time.sleep(0.005)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
