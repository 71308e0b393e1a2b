"""A prefill and a decode process of one protocol, and the order of things in a turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from benchmarks.harness.plan import Plan
from benchmarks.harness.worker import Desk, Worker
from benchmarks.rows import rooms
from benchmarks.rows.rooms import Between, Orders
from benchmarks.sides.base import Setting

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")


class Pair:
    """Two workers with their sides open. ``moves``: the plane brings bytes, so they are checked. ``cpu_seconds``: what
    the rooms of the last turn took in both processes, without the making of their handles.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._next_room = 1
        self._generation = 0
        self.cpu_seconds = 0.0
        self.moves = setting.plane != "null"
        self.prefill = Worker(f"{setting.protocol}-prefill")
        self.decode = Worker(f"{setting.protocol}-decode")
        try:
            loading = [worker.begin(rooms.load, setting) for worker in (self.prefill, self.decode)]
            for one in loading:
                one.result()
            self.open()
        except BaseException:
            self.close()
            raise

    def open(self) -> None:
        bootstrap = self.prefill.call(rooms.start_prefill, self._setting)
        self.decode.call(rooms.start_decode, self._setting, bootstrap)

    def reopen(self) -> None:
        """Everything anew in the same processes: what follows is a first contact."""
        self.decode.call(rooms.stop)
        self.prefill.call(rooms.stop)
        self.open()

    def orders(
        self,
        number: int,
        pages_per_room: int,
        pause: float,
        between: Between = Between.NAP,
        adjacent: bool = False,
    ) -> Orders:
        shape = self._setting.shape
        return Orders(self._next_room, number, pages_per_room, shape.pages, shape.aux_items, pause, between, adjacent)

    def hand_off(
        self,
        orders: Orders,
        receive: Callable[Concatenate[Desk, Orders, Parameters], Value],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Value:
        """One turn with handles made beforehand on both sides; what ``receive`` measured at decode."""
        generation = self._prepare(orders)
        self.decode.call(rooms.make_receivers, orders)
        return self._receive(orders, generation, receive, *args, **kwargs)

    def hand_off_cold(
        self,
        orders: Orders,
        receive: Callable[Concatenate[Desk, Orders, Parameters], Value],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Value:
        """One turn in which ``receive`` makes its own receivers."""
        return self._receive(orders, self._prepare(orders), receive, *args, **kwargs)

    def peak_rss(self) -> int:
        return self.prefill.peak_rss() + self.decode.peak_rss()

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()

    def _prepare(self, orders: Orders) -> int | None:
        self._next_room += orders.rooms
        self._generation += 1
        generation = self._generation if self.moves else None
        self.prefill.call(rooms.prepare_prefill, orders, generation)
        self.decode.call(rooms.prepare_decode, orders, generation)
        return generation

    def _receive(
        self,
        orders: Orders,
        generation: int | None,
        receive: Callable[Concatenate[Desk, Orders, Parameters], Value],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Value:
        before = self._cpu_used()
        sending = self.prefill.begin(rooms.send_rooms, orders)
        measured = self.decode.call(receive, orders, *args, **kwargs)
        sending.result()
        self.cpu_seconds = self._cpu_used() - before
        if generation is not None:
            self.decode.call(rooms.check_pages, orders)
        return measured

    def _cpu_used(self) -> float:
        return self.prefill.call(rooms.cpu_used) + self.decode.call(rooms.cpu_used)


def other(setting: Setting, plan: Plan) -> Setting:
    """The same place with what the plan compares with."""
    return dataclasses.replace(setting, protocol=plan.against)


def named(plan: Plan, seed: str) -> str:
    """What the baseline is, in words; ``seed``: where it is the seeds' protocol."""
    return seed if plan.against == "seed" else "SGLang's classes"
