"""Pulls of kvgrpc beside those of vLLM's own tier ``p2p``: ``python -m benchmarks.pulled_p2p --nixl FOLDER``.

In vLLM's environment; NIXL, which that tier needs, comes from a folder of its own:
``pip install --no-deps --target FOLDER nixl==1.5.1 nixl-cu13==1.5.1``. Two engines have both tiers, and each request
says which one may be asked, so that engines, prompts and machine are the same. What is asked for has been computed by
the first one and lies in its host memory; ``computed`` is another prompt that long. The orders of the three rotate.

``--parts``, in this order:

- ``pulls``: first tokens by the length of the prompt;
- ``saturated``: the first engine computes three long prompts all the time meanwhile;
- ``stopped``, ``cut``, ``killed``: the first engine is stopped (SIGSTOP), cut off once a third of the prompt's bytes
  have come, or killed, and the second is asked for what it has. Then: how many chunks of host memory each engine still
  holds for transfers and for how long, and after how long a pull works again.

To be cut off the first engine lives in a network namespace of its own, behind a link of ``--gbit`` a second (root and
the command ip make it), and both ways use TCP.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.held_chunks import HELD_FILE
from benchmarks.warm import LONGEST, TOKEN_BYTES, first_token, prompt_of, vllm_engine
from kvgrpc.client import SyncClient
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import prefetch_service_pb2 as proto
from tests.engines.engine import LOCAL, ROOT
from tests.engines.model import WIDE, Reference
from tests.engines.vllm_engine import BLOCK, VllmEngine
from tests.engines.vllm_pulling import address
from tests.support import link
from tests.support.ports import free_port
from tests.support.waiting import wait_until

LENGTHS = (512, 2048, 4096)
PARTS = ("pulls", "saturated", "stopped", "cut", "killed")
BUSY_LENGTH, BUSY_REQUESTS = 1024, 3
LOST_LENGTH, CUT_LENGTH = 512, 2048
WAYS = ("kvgrpc", "p2p", "computed")
ENGINES = ("holder", "taker")
# Longer than any time-out of either way.
HELD_SECONDS, AGAIN_SECONDS = 45.0, 90.0


@dataclass
class Pair:
    """The engines and their p2p ports, and what is needed to start the holder again. ``link``: the holder lives at its
    far end."""

    folder: Path
    reference: Reference
    registry: str
    environment: Mapping[str, str]
    data_plane: str = "shm"
    link: link.Link | None = None
    engines: dict[str, VllmEngine] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def host(self, name: str) -> str:
        if self.link is None:
            return LOCAL
        return self.link.host if name == "holder" else self.link.own

    def start(self, name: str) -> None:
        port = free_port()
        tier = {"type": "KvGrpcTier", "module_path": "kvgrpc.engines.vllm.tier", "peers": True}
        pull = {
            "data_plane": self.data_plane,
            "listen": f"{self.host(name)}:0",
            "insecure": True,
            "pull": {"staging_pages": LONGEST // BLOCK},
        }
        p2p = {"type": "p2p", "host": self.host(name), "port": port}
        environment = {**self.environment, HELD_FILE: str(self._held_file(name))}
        if self.link is not None and "UCX_NET_DEVICES" in environment:
            environment["UCX_NET_DEVICES"] = self.link.device(here=name != "holder")
        self.ports[name] = port
        self.engines[name] = vllm_engine(
            name,
            self.folder,
            self.reference.path,
            self.registry,
            tier,
            pull,
            p2p,
            environment=environment,
            kind=VllmEngine if self.link is None or name != "holder" else _behind(self.link, self.folder),
            spec=("CountedOnCpu", "benchmarks.held_chunks"),
        )

    def restart_holder(self) -> None:
        before = address(self.registry, "holder")
        self.engines["holder"].close()
        self.start("holder")
        self.engines["holder"].wait_ready()
        wait_until(lambda: address(self.registry, "holder") != before, 60)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def computed_by_holder(self, length: int) -> list[int]:
        """A prompt that lies in the holder's host memory."""
        prompt = prompt_of(self.reference, length)
        first_token(self.engines["holder"], prompt)
        with SyncClient(address(self.registry, "holder"), timeout=60) as client:
            pages = proto.PromptPages(tokens=prompt)
            wait_until(lambda: client.lookup(pages).host_pages == len(prompt) // BLOCK, 60)
        return prompt

    def ask(self, way: str, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and cached tokens as vLLM counts them."""
        source = {
            "kv_request_id": uuid.uuid4().hex,
            "remote_host": self.host("holder"),
            "remote_port": self.ports["holder"],
        }
        asked: dict[str, Any] = {"pull_from": ["holder"] if way == "kvgrpc" else []}
        if way == "p2p":
            asked["remote_kv_source"] = source
        seconds, request = first_token(self.engines["taker"], prompt, **asked)
        return seconds, request.cached

    def held(self, name: str) -> tuple[int, int]:
        """Chunks of its host memory that an engine holds for transfers, and staging pages."""
        try:
            chunks, staged = map(int, self._held_file(name).read_text().split())
        except FileNotFoundError:
            return 0, 0
        return chunks, staged

    def _held_file(self, name: str) -> Path:
        return self.folder / f"held-{name}"


def _behind(link: link.Link, folder: Path) -> type[VllmEngine]:
    """Engines that live in the namespace of a link, with its own /sys, in which UCX looks for devices."""
    script = folder / "python-there"
    script.write_text(f'#!/bin/sh\nexec ip netns exec {link.name} {sys.executable} "$@"\n')
    script.chmod(0o755)
    return type("There", (VllmEngine,), {"python": str(script)})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nixl", required=True, help="where NIXL was installed")
    parser.add_argument("--ucx-tls", default="tcp", help='UCX_TLS; "": of UCX\'s own choice, shared memory')
    parser.add_argument("--data-plane", default="", help='of kvgrpc: "shm", or "mooncake" where one is cut off')
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--losses", type=int, default=2, help="stops, cuts and kills of the holder for each way")
    parser.add_argument("--gbit", type=float, default=1.0, help="of the link, where one is cut off")
    given = parser.parse_args(arguments)
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/engines/standins/vllm'}:{given.nixl}"}
    if given.ucx_tls:
        environment |= {"UCX_TLS": given.ucx_tls, "UCX_NET_DEVICES": "lo"}
    gbit = given.gbit if "cut" in given.parts else 0.0
    plane = given.data_plane or ("mooncake" if gbit else "shm")
    with tempfile.TemporaryDirectory() as name, opened(Path(name), environment, plane, gbit) as pair:
        over = f"a link of {gbit:g} Gbit/s" if gbit else "loopback"
        print(f"UCX_TLS {given.ucx_tls or 'not set'}, {plane}, {over}, load {os.getloadavg()[0]:.0f}")
        warm(pair, given.lengths[0])
        if "pulls" in given.parts:
            measure_pulls(pair, given.lengths, given.rounds)
        if "saturated" in given.parts:
            measure_saturated(pair, LOST_LENGTH, given.rounds)
        losses = [each for each in PARTS[2:] if each in given.parts]
        if losses:
            measure_losses(pair, losses, given.losses)
        print(f"load {os.getloadavg()[0]:.0f} at the end")


@contextlib.contextmanager
def opened(folder: Path, environment: Mapping[str, str], data_plane: str, gbit: float = 0.0) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        wire = stack.enter_context(linked(gbit)) if gbit else None
        host = LOCAL if wire is None else wire.own
        registry = RegistryServer([f"{host}:0"], ServerSecurity(insecure=True)).open()
        stack.callback(registry.close)
        pair = Pair(folder, Reference(folder, WIDE), registry.address, environment, data_plane, wire)
        stack.callback(pair.close)
        for name in ENGINES:
            pair.start(name)
        for engine in pair.engines.values():
            engine.wait_ready()
        yield pair


@contextlib.contextmanager
def linked(gbit: float) -> Iterator[link.Link]:
    """A link to another network namespace, as quick as said in both directions."""
    if why := link.missing():
        raise SystemExit(f"nothing can be cut off here: {why}")
    wire = link.Link()
    try:
        shaped = ("root", "tbf", "rate", f"{gbit:g}gbit", "burst", "512kb", "latency", "50ms")
        for there, device in (((), wire.device()), (("-n", wire.name), wire.device(here=False))):
            subprocess.run(["tc", *there, "qdisc", "add", "dev", device, *shaped], check=True)
        yield wire
    finally:
        wire.remove()


def warm(pair: Pair, length: int) -> None:
    for engine in pair.engines.values():
        first_token(engine, prompt_of(pair.reference, length))  # kernels of that size are compiled
    for way in ("p2p", "kvgrpc"):
        took, from_cache = pair.ask(way, pair.computed_by_holder(length))
        print(f"the first pull of the pair, {length} tokens, {way}: {took * 1e3:.0f} ms, {from_cache} cached")


def measure_pulls(pair: Pair, lengths: Sequence[int], rounds: int) -> None:
    print(f"| tokens | {' | '.join(WAYS)} | cached then |")
    print("|---:|---:|---:|---:|---|", flush=True)
    for length in lengths:
        first_token(pair.engines["taker"], prompt_of(pair.reference, length))
        print(f"| {length} | {asked_in_turns(pair, length, rounds, contextlib.nullcontext)} |", flush=True)


def measure_saturated(pair: Pair, length: int, rounds: int) -> None:
    print(f"| tokens, holder computes {BUSY_REQUESTS} x {BUSY_LENGTH} | {' | '.join(WAYS)} | cached then |")
    print("|---:|---:|---:|---:|---|", flush=True)
    first_token(pair.engines["holder"], prompt_of(pair.reference, BUSY_LENGTH))
    print(f"| {length} | {asked_in_turns(pair, length, rounds, lambda: busy(pair))} |", flush=True)
    print(f"| held then | {held_until_none(pair, HELD_SECONDS)} |", flush=True)


def asked_in_turns(
    pair: Pair, length: int, rounds: int, meanwhile: Callable[[], contextlib.AbstractContextManager[None]]
) -> str:
    """Cells of a table: medians, and the tokens that were cached."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    cached: dict[str, set[int]] = {way: set() for way in WAYS}
    orders = list(itertools.permutations(WAYS))
    for number in range(rounds):
        prompts = {
            way: prompt_of(pair.reference, length) if way == "computed" else pair.computed_by_holder(length)
            for way in WAYS
        }
        with meanwhile():
            for way in orders[number % len(orders)]:
                took, from_cache = pair.ask(way, prompts[way])
                seconds[way].append(took)
                cached[way].add(from_cache)
    cells = " | ".join(f"{statistics.median(seconds[way]) * 1e3:.0f} ms" for way in WAYS)
    counted = ", ".join(f"{way} {' '.join(map(str, sorted(cached[way])))}" for way in WAYS)
    return f"{cells} | {counted}"


@contextlib.contextmanager
def busy(pair: Pair) -> Iterator[None]:
    """The holder computes some long prompts at a time, and a next one where one is done."""
    holder, over = pair.engines["holder"], threading.Event()

    def feed() -> None:
        running = [holder.generate(prompt_of(pair.reference, BUSY_LENGTH), 1) for _ in range(BUSY_REQUESTS)]
        while not over.is_set():
            running[0].wait(0.05)
            running = [each for each in running if not each.wait(0)]
            while len(running) < BUSY_REQUESTS:
                running.append(holder.generate(prompt_of(pair.reference, BUSY_LENGTH), 1))
        for each in running:
            holder.abort(each)
            each.wait()

    feeding = threading.Thread(target=feed)
    feeding.start()
    try:
        time.sleep(0.5)  # its steps are full by then
        yield
    finally:
        over.set()
        feeding.join()


def measure_losses(pair: Pair, hows: Sequence[str], losses: int) -> None:
    """Of a holder that stops, is cut off, or is killed: both ways in turn, after a pull of each that went well."""
    print("| the holder | way | first token | computed then | cached | still held, then | pulls again after |")
    print("|---|---|---:|---:|---:|---|---:|", flush=True)
    turns = list(itertools.product(hows, range(losses), ("p2p", "kvgrpc")))
    for number, (how, _, way) in enumerate(turns, 1):
        length = CUT_LENGTH if how == "cut" else LOST_LENGTH
        wanted = pair.computed_by_holder(length)
        pair.ask(way, pair.computed_by_holder(LOST_LENGTH))
        with losing(pair, how, length):
            seconds, cached = pair.ask(way, wanted)
            computed, _ = pair.ask("computed", prompt_of(pair.reference, length))
            held = held_until_none(pair, HELD_SECONDS, ENGINES if how == "cut" else ENGINES[1:])
        if how == "stopped":
            held = held_until_none(pair, HELD_SECONDS)
        elif how == "killed" and number < len(turns):
            pair.restart_holder()
        again = "" if how == "killed" and number == len(turns) else pulls_again(pair, way)
        figures = f"{seconds:.2f} s | {computed:.2f} s | {cached}"
        print(f"| {how} | {way} | {figures} | {held} | {again} |", flush=True)


@contextlib.contextmanager
def losing(pair: Pair, how: str, length: int) -> Iterator[None]:
    holder, wire = pair.engines["holder"], pair.link
    if how != "cut":
        holder.stop() if how == "stopped" else holder.kill()
        yield
        if how == "stopped":
            holder.go_on()
        return
    assert wire is not None
    over, counter = threading.Event(), Path(f"/sys/class/net/{wire.device()}/statistics/rx_bytes")
    until = int(counter.read_text()) + length * TOKEN_BYTES // 3

    def cut() -> None:
        while not over.wait(0.001):
            if int(counter.read_text()) >= until:
                wire.cut()
                return

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        yield
    finally:
        over.set()
        cutting.join()
        wire.mend()


def held_until_none(pair: Pair, seconds: float, names: Sequence[str] = ENGINES) -> str:
    """In words, what each engine holds, and for how long at most so many seconds."""
    began, most = time.monotonic(), dict.fromkeys(names, (0, 0))
    none_since: float | None = None
    while (now := time.monotonic()) - began < seconds:
        held = {name: pair.held(name) for name in names}
        most = {name: max(most[name], held[name]) for name in names}
        if any(any(each) for each in held.values()):
            none_since = None
        elif none_since is None:
            none_since = now
        elif now - none_since > 1.5:  # it is told twice a second
            said = ", ".join(f"{name} {chunks} chunks, {staged} staged" for name, (chunks, staged) in most.items())
            return f"{said}: none after {none_since - began:.1f} s"
        time.sleep(0.1)  # until it may have changed
    left = ", ".join(f"{name} {pair.held(name)[0]} chunks, {pair.held(name)[1]} staged" for name in names)
    return f"{left} after {seconds:.0f} s"


def pulls_again(pair: Pair, way: str) -> str:
    """Seconds until a prompt that the holder has computes nothing at the taker."""
    began = time.monotonic()
    while time.monotonic() - began < AGAIN_SECONDS:
        before = time.monotonic()
        _, cached = pair.ask(way, pair.computed_by_holder(BLOCK * 4))
        if cached >= BLOCK * 4:
            return f"{before - began:.1f} s"
        time.sleep(0.5)  # it is asked twice a second at most
    return f"not within {AGAIN_SECONDS:.0f} s"


if __name__ == "__main__":
    main()
