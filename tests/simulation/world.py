"""A world around the real cores, from one seed: processes, a registry, a network, memory. One step is a tick (100 ms).

It does nothing by itself: ``schedules.py`` makes random things happen, ``stage.py`` what a test directs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection

from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.decode.core import DecodeCore
from kvgrpc.transfer.protocol.prefill.core import PrefillCore
from kvgrpc.transfer.protocol.types import Bounds, RoomKey, Target
from tests.simulation.checks import Promises
from tests.simulation.fleet import SINGLES, Fleet
from tests.simulation.hostile import LyingCore, RogueDecode
from tests.simulation.network import Link, Network
from tests.simulation.plane import Residue, Write
from tests.simulation.processes import TIMING, DecodeProcess, PrefillProcess, Process
from tests.simulation.requests import Request, WatchedHandle


class World:
    """``violations`` says what broke, ``log`` how it came to it. ``calm``: data planes have no moods.
    ``peers_only_hold``: nothing happens to a process but that its interpreter is held. ``threads_wait``: what engine
    and transfer threads ask for comes to the loop thread later, between any two frames and ticks.
    """

    def __init__(
        self,
        seed: int,
        decode_core: type[DecodeCore] = DecodeCore,
        prefill_core: type[PrefillCore] = PrefillCore,
        *,
        bounds: Bounds | None = None,
        through_wire: bool = False,
        fleet: Fleet = SINGLES,
        rogues: int = 0,
        liars: Collection[int] = (),
        parts: int = 1,
    ) -> None:
        """``rogues``: hostile decodes. ``liars``: prefill ranks that answer what they like, ``suspects``: ever did.
        ``parts``: so many of prefill's pages fill one of decode's."""
        self.seed = seed
        self.fleet = fleet
        self.parts = parts
        self.liars = self.suspects = frozenset(liars)
        self.random = random.Random(seed)
        self.now = 0
        self.calm = self.peers_only_hold = False
        self.threads_wait = False
        self.violations: list[tuple[int, str, object]] = []
        self.log: list[tuple[object, ...]] = []
        self.outcomes: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.network = Network(self, self.random, through_wire)
        self.promises = Promises(self)
        self.listening: dict[str, PrefillProcess] = {}
        self._cores = decode_core, prefill_core
        self._bounds = bounds or Bounds()
        self._epoch = self._connections = 0
        self._residues: list[Residue] = []
        self._todo: list[tuple[int, Callable[[], object]]] = []
        self.prefills: list[PrefillProcess] = []
        self.current = [self._start_prefill(number, f"a{number}") for number in range(len(fleet.prefills))]
        self.registry = [prefill.target for prefill in self.current]
        self.decodes = [self._start_decode(number) for number in range(len(fleet.decodes))]
        self.rogues = [RogueDecode(self, number) for number in range(rogues)]

    # Time.

    def step(self) -> None:
        """One tick of everything that runs."""
        self.now += 1
        due = [action for moment, action in self._todo if moment <= self.now]
        self._todo = [later for later in self._todo if later[0] > self.now]
        for action in due:
            action()
        processes: list[DecodeProcess | PrefillProcess] = [*self.decodes, *self.prefills]
        for process in self.random.sample(processes, len(processes)):
            process.take_turn(self.random)
            if process.state == "running":
                process.core.tick()
                process.take_turn(self.random)
                process.schedule(self.random)
        for rogue in self.rogues:
            rogue.step(self.random)
        self.network.carry()
        self._move_bytes()
        self.promises.check()
        self._check_counters()

    def at(self, delay: int, action: Callable[[], object]) -> None:
        """Later, in ticks."""
        self._todo.append((self.now + delay, action))

    @property
    def over(self) -> bool:
        """Nothing is left to happen."""
        rooms = any(decode.core.rooms for decode in self.decodes)
        if any(process.busy and process.state == "running" for process in (*self.decodes, *self.prefills)):
            return False
        return not self._todo and not rooms and not any(prefill.core.rooms for prefill in self.prefills)

    # Requests.

    def begin_decode(self, number: int, request: Request) -> None:
        decode = self.decodes[number]
        if decode.state == "running":
            self.note(decode.ref, "opens", request)
            decode.begin(request, late=self.random.random() < 0.2)

    def begin_prefill(self, number: int, request: Request) -> None:
        prefill = self.current[number]
        if prefill.state == "running":
            prefill.begin(request, self.random)

    # Faults.

    def kill_prefill(self, prefill: PrefillProcess) -> None:
        self._disturb(prefill)
        self.promises.after_death_of_prefill(prefill)
        self.note(prefill.ref, "killed")
        prefill.plane.die()
        self._retire(prefill)

    def kill_decode(self, decode: DecodeProcess) -> DecodeProcess:
        """Killed and started again at once, as a new incarnation."""
        self._disturb(decode)
        self.promises.after_death_of_decode(decode)
        self.note(decode.ref, "killed")
        decode.state = "dead"
        self.network.process_died(decode)
        again = self.decodes[decode.number] = self._start_decode(decode.number)
        return again

    def restart(self, number: int, address: str, registry_lag: int = 0) -> None:
        """A new incarnation of a prefill rank; the registry hears of it later."""
        if address not in self.listening:
            prefill = self.current[number] = self._start_prefill(number, address)
            self.at(registry_lag, lambda: self._register(prefill)) if registry_lag else self._register(prefill)

    def stop(self, process: Process, ticks: int) -> None:
        if process.state == "running":
            self._disturb(process)
            process.state = "stopped"
            self.note(process.ref, "SIGSTOP", ticks)
            if isinstance(process, PrefillProcess):
                self.promises.after_stop_of_prefill(process)
            self.at(ticks, lambda: self.go_on(process))

    def hold(self, process: Process, ticks: int) -> None:
        """Its interpreter is held, by a compiler for example: it says and hears nothing, and its kernel, the library's
        threads and its data plane go on."""
        if process.state == "running":
            self._disturb(process)
            process.state = "held"
            self.note(process.ref, "held", ticks)
            self.at(ticks, lambda: self.go_on(process))

    def go_on(self, process: Process) -> None:
        if process.state in ("stopped", "held") and not process.stopped_forever:
            self._disturb(process)
            self.note(process.ref, "goes on")
            process.state, process.went_on_at = "running", self.now

    def cut(self, decode: DecodeProcess, prefill: PrefillProcess, ticks: int) -> None:
        self._disturb(decode)
        self._disturb(prefill)
        self.note("cut", decode.ref, prefill.address, ticks)
        self.network.cut(decode, prefill.address, ticks)

    def break_stream(self, link: Link) -> None:
        self._disturb(link.decode)
        if link.prefill is not None:
            self._disturb(link.prefill)
        self.network.break_stream(link)

    def drain(self, prefill: PrefillProcess) -> None:
        """Its successor starts elsewhere; it keeps its port until no write of its is left (4, proof of death)."""
        if prefill.state != "running" or prefill.draining:
            return
        self.note(prefill.ref, "drains")
        prefill.draining = True
        prefill.core.drain()
        if self.current[prefill.number] is prefill:
            self.restart(prefill.number, prefill.address + '"', registry_lag=5)

    def end_hostilities(self) -> None:
        """Rogues and liars die; whoever comes in their place keeps the rules."""
        for rogue in self.rogues:
            rogue.leave()
        self.rogues.clear()
        liars, self.liars = self.liars, frozenset()
        for prefill in [prefill for prefill in self.prefills if prefill.number in liars]:
            self.kill_prefill(prefill)

    # What processes and their hardware do to the world.

    def land(self, writer: PrefillProcess, write: Write) -> None:
        """Bytes reach memory."""
        target = write.target
        if target.state == "dead":
            return
        if target.owner[write.page] != write.key:
            self.violate(f"foreign write on page {write.page} of {target.owner[write.page]}", write.key)
        else:
            target.memory[write.page][writer.number, write.part] = (write.key, write.position)

    def leave(self, write: Write, writer: PrefillProcess, killed: bool = False) -> None:
        """The writer writes no more, but these bytes are on their way: in our buffers, its kernel's if ``killed``."""
        cut = killed and self.network.is_cut(write.target, writer)
        due = write.target.core.now + self.random.randrange(TIMING.settle)
        self._connections += 1
        self._residues.append(Residue(f"connection {self._connections}", write, writer, self.now, cut, due))

    def connections(self, decode: DecodeProcess, writer: RankRef) -> frozenset[str]:
        """Connections over which bytes of a killed incarnation are still to come (8, pages by evidence)."""
        return frozenset(
            residue.connection
            for residue in self._residues
            if residue.write.target is decode and residue.source == writer
        )

    def ended(self, process: Process, key: RoomKey, handle: WatchedHandle) -> None:
        """An engine saw the end of a handle."""
        failure = handle.aborted or handle.failure
        cause = "ok" if failure is None else failure.reason.name
        self.outcomes[f"{process.ref.rank.engine[0]} {cause}"] += 1
        if self.peers_only_hold and cause == "PEER_LOST":
            self.violate("a room is lost to a peer that is alive", key)
        self.note(process.ref, "ended", key, cause)

    def violate(self, what: str, key: object) -> None:
        self.violations.append((self.now, what, key))
        self.note("VIOLATION", what, key)

    def note(self, *what: object) -> None:
        self.log.append((self.now, *what))

    # One step.

    def _move_bytes(self) -> None:
        for prefill in list(self.prefills):
            if prefill.state == "running":
                prefill.feed(self.random)
            prefill.plane.move(self.random, self.calm)
            if prefill.draining and prefill.state == "running":
                self._end_drain(prefill)
        for residue in list(self._residues):
            self._deliver(residue)

    def _deliver(self, residue: Residue) -> None:
        target = residue.write.target
        if target.state == "dead":
            self._residues.remove(residue)
        elif residue.cut:
            if not self.network.is_cut(target, residue.writer):
                # TCP's backoff: the next try is as far away as the last one was.
                residue.cut = False
                residue.due = target.core.now + self.random.randrange(1 + self.now - residue.sent_at)
        elif target.core.now >= residue.due:
            self._residues.remove(residue)
            if self.random.random() < 0.7:
                self.land(residue.writer, residue.write)

    def _end_drain(self, prefill: PrefillProcess) -> None:
        if prefill.plane.late and self.random.random() < 0.05:
            prefill.plane.destroy()
        over = prefill.plane.idle and not prefill.core.open_writes and not prefill.core.open_rooms
        if over and self.random.random() < 0.1:
            self.note(prefill.ref, "drained")
            self._retire(prefill, goodbye=True)

    def _check_counters(self) -> None:
        # At decode it may be right: a record expired while the pair was cut off (11, memory of the ended).
        for prefill in self.prefills:
            if prefill.core.ignored_entries and not isinstance(prefill.core, LyingCore):
                prefill.core.ignored_entries = 0
                self.violate("decode's news went back", prefill.ref)

    # Processes.

    def _start_prefill(self, number: int, address: str) -> PrefillProcess:
        self._epoch += 1
        core = LyingCore if number in self.liars else self._cores[1]
        prefill = PrefillProcess(self, number, self._epoch, address, core, self._bounds)
        if isinstance(prefill.core, LyingCore):
            prefill.core.liar = self.random
        self.prefills.append(prefill)
        self.listening[address] = prefill
        self.note(prefill.ref, "listens at", address)
        return prefill

    def _start_decode(self, number: int) -> DecodeProcess:
        self._epoch += 1
        return DecodeProcess(self, number, self._epoch, self._cores[0], self._bounds)

    def _register(self, prefill: PrefillProcess) -> None:
        if self.registry[prefill.number].ref.epoch < prefill.ref.epoch:
            self.registry[prefill.number] = Target(prefill.ref, prefill.address)

    def _retire(self, prefill: PrefillProcess, goodbye: bool = False) -> None:
        prefill.state = "dead"
        if self.listening.get(prefill.address) is prefill:
            del self.listening[prefill.address]
        self.network.process_died(prefill, goodbye)
        self.prefills.remove(prefill)

    def _disturb(self, process: Process) -> None:
        process.disturbances += 1
