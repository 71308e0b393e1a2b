"""Stand-ins for what the vLLM wheel, built for CUDA, lacks on a machine without a GPU."""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any


def prepare() -> None:
    """Run by a .pth line in every interpreter: the CPU platform, and no report to vLLM's makers."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def register() -> None:
    """vLLM's plug-in, run in each of its processes.

    VLLM_ON_CPU_PLUGIN ("module:function") names one more, which needs not be installed.
    """
    import torch
    from vllm.platforms import current_platform

    import vllm_on_cpu.expert_kernels
    import vllm_on_cpu.kernels
    import vllm_on_cpu.recurrent_kernels
    import vllm_on_cpu.speculative_kernels

    vllm_on_cpu.expert_kernels.register()

    # Where the processor has these vLLM takes other kernels, with weights packed for them. All machines shall run ours.
    for feature in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        setattr(torch.cpu, feature, lambda: False)
    # What vLLM's own Mooncake connector asks of an accelerator.
    torch.accelerator.current_device_index = lambda: 0
    type(current_platform).set_device = classmethod(lambda cls, device: None)
    _put_arguments_in_order()
    more = os.environ.get("VLLM_ON_CPU_PLUGIN")
    if more:
        module, _, function = more.partition(":")
        getattr(importlib.import_module(module), function)()


def _put_arguments_in_order() -> None:
    """What CPUs have for a Triton kernel takes the size of blocks before the slots in vLLM 0.31.0 and 0.32.0; the
    latter calls it by position, in the kernel's order: slots first."""
    import torch
    from vllm.utils import cpu_triton_utils

    name = "_compute_slot_mapping_kernel_impl"
    kernel = getattr(cpu_triton_utils, name)
    if list(inspect.signature(kernel).parameters)[6:8] != ["block_size", "slot_mapping"]:
        return

    def compute_slot_mapping(*launched: Any) -> None:
        size, slots = sorted(launched[6:8], key=lambda each: isinstance(each, torch.Tensor))
        kernel(*launched[:6], size, slots)

    setattr(cpu_triton_utils, name, compute_slot_mapping)
