"""The waits of a pull, as values: whoever drives it waits with a thread, or in a simulation with none."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from kvgrpc.transfer import KVReceiver

Result = TypeVar("Result")


class Wait(Protocol):
    """``block`` waits with the calling thread and returns what the pull goes on with, or raises it."""

    def block(self) -> Any: ...


Waiting: TypeAlias = Generator[Wait, Any, Result]
"""A pull that decides and acts at once, and yields where time passes: it is sent what came of each wait."""


@dataclass(frozen=True, slots=True)
class ForTime:
    """The time after which a busy holder may be asked again."""

    seconds: float

    def block(self) -> None:
        time.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class ForPages:
    """Staging pages, for at most ``seconds``. ``take(seconds)`` returns them; none, where none came back in time."""

    take: Callable[[float], list[int]]
    seconds: float

    def block(self) -> list[int]:
        return self.take(self.seconds)


@dataclass(frozen=True, slots=True)
class ForAnswer:
    """Of other engines: who has a prompt, or what one of them lends. ``ask`` has its own bound in time."""

    ask: Callable[..., Any]
    arguments: tuple[Any, ...]

    def block(self) -> Any:
        return self.ask(*self.arguments)


@dataclass(frozen=True, slots=True)
class ForRoom:
    """The end of a room, for at most ``seconds``."""

    receiver: KVReceiver
    seconds: float

    def block(self) -> None:
        self.receiver.wait(self.seconds)


def blocking(work: Waiting[Result]) -> Result:
    """Drives a pull with the calling thread."""
    try:
        wait = next(work)
        while True:
            try:
                answer = wait.block()
            except BaseException as error:  # the pull gives back what it has, and raises it again
                wait = work.throw(error)
            else:
                wait = work.send(answer)
    except StopIteration as over:
        result: Result = over.value
        return result


__all__ = ["ForAnswer", "ForPages", "ForRoom", "ForTime", "Wait", "Waiting", "blocking"]
