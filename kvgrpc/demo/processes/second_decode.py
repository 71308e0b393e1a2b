"""A second decode engine, which takes pages from the first one's host cache instead of computing them."""

from __future__ import annotations

from kvgrpc.demo.engine.config import DECODE
from kvgrpc.demo.processes.child import Router
from kvgrpc.demo.processes.decode import DecodeScheduler
from kvgrpc.demo.processes.rank import serve
from kvgrpc.model import Role


def main(router: Router) -> None:
    serve("decode-2", Role.DECODE, DECODE, router, DecodeScheduler)
