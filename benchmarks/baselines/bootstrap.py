"""The seeds' rendezvous: an HTTP server with one route, where prefill puts its address and decode asks for it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

import requests
from aiohttp import web

TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class PrefillAddress:
    """Where a prefill rank takes control messages."""

    host: str
    port: int


class BootstrapServer:
    """Serves ``/route`` from an event loop of its own thread. ``address`` is "host:port", ready when constructed."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._ranks: dict[int, dict[int, PrefillAddress]] = {}
        self._dp_size = 0
        self._tp_per_dp = 0
        self._lock = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._port = 0
        self._thread = threading.Thread(target=self._serve, name="seed-bootstrap", daemon=True)
        self._thread.start()
        if not self._ready.wait(TIMEOUT):
            raise TimeoutError(f"the bootstrap server did not listen within {TIMEOUT} s")

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        application = web.Application()
        application.router.add_put("/route", self._register)
        application.router.add_get("/route", self._resolve)
        runner = web.AppRunner(application, access_log=None)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, self._host, 0)
        self._loop.run_until_complete(site.start())
        self._port = runner.addresses[0][1]
        self._ready.set()
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()

    async def _register(self, request: web.Request) -> web.Response:
        row = await request.json()
        async with self._lock:
            self._dp_size = self._dp_size or int(row["dp_size"])
            self._tp_per_dp = self._tp_per_dp or int(row["tp_size"]) // int(row["dp_size"])
            group, position = divmod(int(row["engine_rank"]), self._tp_per_dp)
            address = PrefillAddress(str(row["rank_ip"]), int(row["rank_port"]))
            self._ranks.setdefault(group, {})[position] = address
        return web.Response(text="OK")

    async def _resolve(self, request: web.Request) -> web.Response:
        try:
            engine_rank, group = int(request.query["engine_rank"]), int(request.query["target_dp_group"])
        except (KeyError, ValueError):
            return web.Response(text="engine_rank and target_dp_group are needed", status=400)
        if engine_rank == -1 and group == -1:
            return web.json_response({"prefill_dp_size": self._dp_size, "tp_size_per_dp_rank": self._tp_per_dp})
        async with self._lock:
            found = self._ranks.get(group, {}).get(engine_rank % max(self._tp_per_dp, 1))
        if found is None:
            return web.Response(text="no such rank", status=404)
        return web.json_response({"rank_ip": found.host, "rank_port": found.port})


def register_prefill(server: str, address: PrefillAddress, engine_rank: int = 0) -> None:
    """Tells the server where one rank of a prefill engine with tp = dp = 1 listens. Raises on any refusal."""
    row = {
        "role": "Prefill",
        "tp_size": 1,
        "dp_size": 1,
        "rank_ip": address.host,
        "rank_port": address.port,
        "engine_rank": engine_rank,
    }
    requests.put(f"http://{server}/route", json=row, timeout=TIMEOUT).raise_for_status()


def resolve_prefill(server: str, engine_rank: int = 0, dp_group: int = 0) -> PrefillAddress:
    """Asks the server for one rank. Raises on any refusal."""
    query = {"engine_rank": engine_rank, "target_dp_group": dp_group}
    response = requests.get(f"http://{server}/route", params=query, timeout=TIMEOUT)
    response.raise_for_status()
    found = response.json()
    return PrefillAddress(found["rank_ip"], found["rank_port"])
