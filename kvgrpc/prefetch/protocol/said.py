"""What a rank said to its leader and has no answer to. Pure, but for what it holds for its caller."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgrpc.prefetch.model import Stop
from kvgrpc.prefetch.protocol.votes import Decided, Decision, Stage, Vote

_STEPS = 20


@dataclass(slots=True)
class _Said:
    vote: Vote
    decided: Decided
    doubt_ends: float


class SaidVotes:
    """A rank's table. ``doubt``: seconds that it waits for the leader's word after its last vote of an operation.

    They are seconds that this process is awake: one that slept hears what was decided meanwhile before it gives up.
    ``tick`` counts them, at least every ``step`` seconds, from where the leader's messages are read.
    """

    def __init__(self, doubt: float) -> None:
        self.step = doubt / _STEPS
        self._doubt = doubt
        self._said: dict[tuple[str, Stage], _Said] = {}
        self._beat = 0.0
        self._awake = 0.0
        self._last_tick: float | None = None

    def say(self, vote: Vote, decided: Decided) -> Vote:
        """The vote as it is to be sent. It replaces what was said of the same step before."""
        vote = replace(vote, beat=self._beat)
        self._said[vote.key, vote.stage] = _Said(vote, decided, self._awake + self._doubt)
        return vote

    def heard_beat(self, beat: float) -> None:
        """The leader's time, which it said in a message that was just read."""
        self._beat = beat

    def answered(self, key: str, stage: Stage) -> Decided | None:
        """Whom to tell, once."""
        said = self._said.pop((key, stage), None)
        return None if said is None else said.decided

    def forget(self, key: str) -> None:
        """Nobody waits for an answer any more."""
        for stage in Stage:
            self._said.pop((key, stage), None)

    def undecided(self) -> list[Vote]:
        """What has to be said again on a new stream, as it was said first."""
        return [said.vote for said in self._said.values()]

    def tick(self, now: float) -> list[Decision]:
        """Last votes that were in doubt for too long: what holds here is that the leader was absent."""
        passed = 0.0 if self._last_tick is None else now - self._last_tick
        self._last_tick = now
        if passed > 2 * self.step:
            # It slept: what lies in its sockets is read first.
            return []
        self._awake += passed
        return [
            Decision(key, stage, 0, Stop.RANK_ABSENT)
            for (key, stage), said in self._said.items()
            if stage is Stage.COMPLETED and said.doubt_ends <= self._awake
        ]


__all__ = ["SaidVotes"]
