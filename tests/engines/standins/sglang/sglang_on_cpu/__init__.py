"""Stand-ins for what the SGLang wheel needs of a GPU machine. With torch_native attention none of it is ever called."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

# SGLang imports these at module level.
ABSENT = {
    *("sgl_kernel", "flashinfer", "torchao", "outlines", "decord", "soundfile", "torchaudio", "deep_gemm", "cutlass"),
}


def prepare() -> None:
    """Run by a .pth line in every interpreter: the CPU engine, and modules for the packages that are absent."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.meta_path.append(_Absent())  # last: a real package wins


def register() -> None:
    """SGLang's plug-in: its own Mooncake sender takes page numbers without pinned memory and CUDA events.

    SGLANG_ON_CPU_PLUGIN ("module:function") names one more plug-in, which needs not be installed.
    """
    more = os.environ.get("SGLANG_ON_CPU_PLUGIN")
    if more:
        module, _, function = more.partition(":")
        getattr(importlib.import_module(module), function)()
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False

    from sglang.srt.mem_cache.allocator import paged

    if not hasattr(paged, "alloc_decode_naive"):  # 0.5.21 and older, which find pages by Triton alone
        paged.alloc_extend_kernel = _Kernel(
            lambda prefixes, lengths, last, free, out, _, page: paged.alloc_extend_naive(
                prefixes, lengths, last, free, out, page, out.device
            )
        )
        paged.alloc_decode_kernel = _Kernel(
            lambda lengths, last, free, out, _, page: paged.alloc_extend_naive(
                lengths - 1, lengths, last, free, out, page, out.device
            )
        )


class _Kernel:
    """A function in the place of one of Triton's, which is launched as ``kernel[grid](…)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._function


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Class(type):
    def __getattr__(cls, name: str) -> Any:
        return _anything(name)


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        # What is capitalised may be subclassed, or stand in an annotation.
        return _Class(name, (), {}) if name[:1].isupper() else _anything(name)


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from unittest.mock import MagicMock  # here, because it takes 50 ms

    return MagicMock(name=name)
