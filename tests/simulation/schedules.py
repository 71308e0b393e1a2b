"""Random schedules: requests and faults of all kinds for a while, then quiet, until everything is over."""

from __future__ import annotations

import random
from functools import partial

from kvgrpc.transfer.protocol.decode.core import DecodeCore
from kvgrpc.transfer.protocol.prefill.core import PrefillCore
from kvgrpc.transfer.protocol.types import Align, Bounds, RoomKey
from tests.simulation.checks import LATENCY, check_end
from tests.simulation.fleet import FLEETS, SINGLES
from tests.simulation.processes import TIMING, DecodeProcess, PrefillProcess
from tests.simulation.requests import Request
from tests.simulation.world import World

REQUESTS_SHARE, FAULTS_SHARE = 0.12, 0.06
TIGHT = Bounds(unclaimed_per_session=4, unclaimed=5, ended_records=6, known_streams=16, held_pages=4, unknown_writes=1)
# A pair's bounds are tight, a rank's are not: past its own a hostile peer is refused, and nobody else is.
AMONG_ENEMIES = Bounds(unclaimed_per_session=4, ended_records=64, held_pages=3)
FAULTS = (
    *["break"] * 6,
    *["kill prefill"] * 2,
    "move prefill",
    *["stop prefill"] * 2,
    "stop decode",
    "stop both",
    *["cut"] * 2,
    "kill prefill behind a cut",
    "kill decode",
    "drain",
    *["destroy engine"] * 2,
    "hold prefill",
    "hold decode",
)
HOLDS = ("hold prefill", "hold decode", "hold both")


class Schedule(World):
    """One seed. Every fourth goes through the wire format, every third has tight bounds, every fifth has hostile peers,
    of every five two have rooms with pages of two pools; layouts take turns. In every seventh that has no hostile peers
    nothing goes wrong but that interpreters are held. In two of eleven, two or three of prefill's pages fill one of
    decode's.
    """

    def __init__(
        self, seed: int, decode_core: type[DecodeCore] = DecodeCore, prefill_core: type[PrefillCore] = PrefillCore
    ) -> None:
        hostile = seed % 5 == 4
        only_hold = seed % 7 == 3 and not hostile
        bounds = TIGHT if seed % 3 == 0 and not only_hold else Bounds()
        fleet = FLEETS[seed // 2 % len(FLEETS)]
        super().__init__(
            seed,
            decode_core,
            prefill_core,
            bounds=AMONG_ENEMIES if hostile else bounds,
            through_wire=seed % 4 == 0,
            fleet=fleet,
            rogues=2 if hostile else 0,
            liars=[2] if hostile and fleet is SINGLES else [],
            parts={5: 2, 8: 3}.get(seed % 11, 1),
        )
        self.network.slow_share = 0.0 if only_hold else 0.4
        self.threads_wait = True
        self.peers_only_hold = only_hold
        self.two_pools = seed % 5 in (1, 4)
        self._rooms = 0

    def run(self, faulty: int = 250, most: int = 900) -> Schedule:
        """Trouble for ``faulty`` steps, then quiet until everything is over, at most ``most`` steps."""
        for _ in range(faulty):
            if self.random.random() < REQUESTS_SHARE:
                self._request()
            if self.random.random() < FAULTS_SHARE:
                self._fault()
            self.step()
        self._calm_down()
        for step in range(most):
            self.step()
            if step % 20 == 0 and self.over:
                break
        for process in (*self.decodes, *self.prefills):
            if process.state == "running":
                process.run_commands()
        check_end(self)
        return self

    def _calm_down(self) -> None:
        """Cuts heal, most of what was stopped goes on, data planes have no moods any more."""
        self.calm = True
        self.end_hostilities()
        self.network.cuts.clear()
        self.network.slow_share = 0.0
        for prefill in self.prefills:
            prefill.stopped_forever = prefill.state == "stopped" and self.random.random() < 0.4
        for process in (*self.decodes, *self.prefills):
            self.go_on(process)

    def _request(self, attempt: int = 0, room: int = 0) -> None:
        """Each side comes first, or late, or never; some ask again with a new attempt."""
        rnd = self.random
        if not room:
            self._rooms += 1
            room = self._rooms
        prefills, decodes = self._ranks()
        align = rnd.choice([Align.HEAD, Align.TAIL] if self.parts == 1 else [Align.HEAD])
        extra, prefix = rnd.choice([0, 0, 1, 2]), rnd.random() < 0.5
        states = self._states(align)
        pages, parts, left = room % 4, self.parts, room // 4 % self.parts
        request = Request(RoomKey(room, attempt), prefills, pages, extra, align, prefix, decodes, states, parts, left)
        for number in decodes:
            if rnd.random() < 0.95:
                self.at(rnd.choice([0, 0, 5, 20]), partial(self.begin_decode, number, request))
                if rnd.random() < 0.15:
                    self.at(rnd.randrange(60), partial(self._abort_decode, number, request))
        for number in prefills:
            if rnd.random() < 0.94:
                self.at(rnd.choice([0, 0, 3, 20, 120]), partial(self.begin_prefill, number, request))
                if rnd.random() < 0.08:
                    self.at(rnd.randrange(60), partial(self._abort_current, number, request))
        if rnd.random() < 0.15 and not attempt:
            self.at(rnd.randrange(40), lambda: self._request(1, room))

    def _states(self, align: Align) -> tuple[int | None, int | None]:
        """Pages of the second pool, as decode and as prefill know them: most of the time of one mind, or such that
        decode wants the last of them.
        """
        rnd = self.random
        known: tuple[int | None, ...] = (None, 0, 1, 2) if self.two_pools else (None,)
        one = rnd.choice(known)
        if one is not None and align is Align.TAIL and rnd.random() < 0.5:
            return one, one + rnd.choice([1, 2])
        return one, one if rnd.random() < 0.9 else rnd.choice(known)

    def _abort_decode(self, number: int, request: Request) -> None:
        self._abort(self.decodes[number], request)

    def _abort_current(self, number: int, request: Request) -> None:
        self._abort(self.current[number], request)

    def _ranks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The prefill and the decode ranks of a request: a replica of either engine."""
        rnd, fleet = self.random, self.fleet
        if fleet is SINGLES:
            known = range(len(fleet.prefills))
            return tuple(sorted(rnd.sample(known, rnd.randint(1, len(known))))), (rnd.randrange(len(fleet.decodes)),)
        prefill, decode = rnd.randrange(fleet.prefill.dp), rnd.randrange(fleet.decode.dp)
        return fleet.replica(fleet.prefills, prefill), fleet.replica(fleet.decodes, decode)

    def _abort(self, process: DecodeProcess | PrefillProcess, request: Request) -> None:
        if process.state == "running":
            process.abort(request.key)

    def _fault(self) -> None:
        rnd = self.random
        kind = rnd.choice(HOLDS if self.peers_only_hold else FAULTS)
        decode = rnd.choice(self.decodes)
        alive = self.prefills or list(self.current)  # none where all were killed and none is back yet
        prefill = self.current[rnd.randrange(len(self.current))] if rnd.random() < 0.8 else rnd.choice(alive)
        long = rnd.choice([5, 15, 50, 200])
        if prefill.state == "dead":
            return
        if kind == "break":
            standing = [link for link in self.network.links if link.standing]
            busy = [link for link in standing if link.to_prefill]  # what is on its way will be stale
            if standing:
                self.break_stream(rnd.choice(busy or standing))
        elif kind == "kill prefill":
            self.kill_prefill(prefill)
            self._replace(prefill, prefill.address)
        elif kind == "move prefill":
            if rnd.random() < 0.7:
                self.stop(prefill, rnd.randrange(20, 200))
            self._replace(prefill, prefill.address + "'")
        elif kind == "stop prefill":
            self.stop(prefill, long)
        elif kind == "stop decode":
            self.stop(decode, long)
        elif kind == "stop both":
            self.stop(decode, long)
            self.stop(prefill, long + rnd.randrange(5))
        elif kind.startswith("hold"):
            for process in (decode, prefill):
                if kind.endswith(("both", "decode" if process is decode else "prefill")):
                    ticks = rnd.choice([5, 15, 50, 120, TIMING.silence - LATENCY])
                    # One that has just come back says first what it is over with: a decode loses its stream otherwise.
                    if self.now > process.went_on_at + LATENCY:
                        self.hold(process, ticks)
        elif kind == "cut":
            self.cut(decode, prefill, rnd.choice([5, 15, 50, 150]))
        elif kind == "kill prefill behind a cut":  # what its kernel still has arrives long after
            if prefill.plane.in_flight:
                decode = prefill.plane.in_flight[0].target
            if decode.state != "dead":
                self.cut(decode, prefill, rnd.randrange(40, 150))
            self.kill_prefill(prefill)
            self._replace(prefill, prefill.address)
        elif kind == "kill decode":
            self._kill_decode(decode, rnd)
        elif kind == "drain":
            self.drain(prefill)
        elif prefill.state == "running" and (prefill.plane.late or rnd.random() < 0.3):
            self.note(prefill.ref, "destroys its engine")
            prefill.plane.destroy()

    def _replace(self, prefill: PrefillProcess, address: str) -> None:
        """A new incarnation, unless the rank has one already; the registry may hear of it late."""
        if self.current[prefill.number] is prefill:
            lag = self.random.choice([0, 5, 20])
            self.at(self.random.choice([0, 3, 30]), lambda: self.restart(prefill.number, address, lag))

    def _kill_decode(self, decode: DecodeProcess, rnd: random.Random) -> None:
        self.kill_decode(decode)
        for receiving in decode.receiving.values():  # a router may retry the same key
            if rnd.random() < 0.3:
                request = receiving.request
                self.at(rnd.randrange(10), partial(self.begin_decode, decode.number, request))
