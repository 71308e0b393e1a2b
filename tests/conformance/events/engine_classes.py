"""Loads ``kv_events.py`` of a published engine without the engine: what it imports of the engine gets stand-ins.

    from engine_classes import load
    kv_events = load("sglang", "/path/of/sglang-0.5.23-....whl")    # or a site-packages folder

What is loaded is the engine's own text, unchanged: its classes, its publisher, its factory.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

FILES = {
    "sglang": {"sglang.srt.disaggregation.kv_events": "sglang/srt/disaggregation/kv_events.py"},
    "vllm": {
        "vllm.config.kv_events": "vllm/config/kv_events.py",
        "vllm.distributed.kv_events": "vllm/distributed/kv_events.py",
    },
}


def load(engine: str, source: str | Path) -> Any:
    """The module of that engine, out of a wheel or a site-packages folder."""
    for name, module in {"sglang": _sglang, "vllm": _vllm}[engine]().items():
        sys.modules.setdefault(name, module)
    for name, path in FILES[engine].items():
        module = types.ModuleType(name)
        sys.modules[name] = module
        exec(compile(_text(Path(source), path), path, "exec"), module.__dict__)
    return sys.modules[next(reversed(FILES[engine]))]


def version(engine: str, source: str | Path) -> str:
    """The engine's version, as its metadata says it."""
    if Path(source).suffix == ".whl":
        return Path(source).name.split("-")[1]
    (info,) = Path(source).glob(f"{engine}-*.dist-info")
    return info.name.removeprefix(f"{engine}-").removesuffix(".dist-info")


def _text(source: Path, path: str) -> str:
    if source.suffix == ".whl":
        with zipfile.ZipFile(source) as wheel:
            return wheel.read(path).decode()
    return (source / path).read_text()


def _module(name: str, **contents: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(contents)
    return module


class _Address:
    """Of SGLang's NetworkAddress, what a publisher calls."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port, self.is_ipv6 = host, port, ":" in host

    @classmethod
    def parse(cls, text: str) -> _Address:
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def to_tcp(self) -> str:
        return f"tcp://{f'[{self.host}]' if self.is_ipv6 else self.host}:{self.port}"


def _sglang() -> dict[str, types.ModuleType]:
    parallel = types.SimpleNamespace(pp_rank=0, attn_tp_rank=0, attn_cp_rank=0)
    return {
        "sglang": _module("sglang"),
        "sglang.srt": _module("sglang.srt"),
        "sglang.srt.disaggregation": _module("sglang.srt.disaggregation"),
        "sglang.srt.runtime_context": _module("sglang.srt.runtime_context", get_parallel=lambda: parallel),
        "sglang.srt.utils": _module("sglang.srt.utils"),
        "sglang.srt.utils.network": _module("sglang.srt.utils.network", NetworkAddress=_Address),
    }


def _vllm() -> dict[str, types.ModuleType]:
    network = _module(
        "vllm.utils.network_utils",
        get_ip=lambda: "127.0.0.1",
        get_tcp_uri=lambda host, port: f"tcp://{host}:{port}",
        is_valid_ipv6_address=lambda address: ":" in address,
        split_zmq_path=lambda path: ("tcp", *path.removeprefix("tcp://").rsplit(":", 1)),
    )
    return {
        "vllm": _module("vllm"),
        "vllm.config": _module("vllm.config"),
        "vllm.config.utils": _module("vllm.config.utils", config=dataclasses.dataclass),
        "vllm.distributed": _module("vllm.distributed"),
        "vllm.logger": _module("vllm.logger", init_logger=logging.getLogger),
        "vllm.utils": _module("vllm.utils"),
        "vllm.utils.network_utils": network,
        "vllm.v1": _module("vllm.v1"),
        "vllm.v1.core": _module("vllm.v1.core"),
        "vllm.v1.core.kv_cache_utils": _module("vllm.v1.core.kv_cache_utils", ExternalBlockHash=bytes | int),
    }
