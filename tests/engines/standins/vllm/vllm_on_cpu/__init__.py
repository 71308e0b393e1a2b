"""Stand-ins for what the vLLM wheel, built for CUDA, lacks on a machine without a GPU."""

from __future__ import annotations

import os


def prepare() -> None:
    """Run by a .pth line in every interpreter: the CPU platform, and no report to vLLM's makers."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def register() -> None:
    """vLLM's plug-in, run in each of its processes."""
    import torch
    from vllm.platforms import current_platform

    import vllm_on_cpu.kernels  # noqa: F401  defines them

    # What vLLM's own Mooncake connector asks of an accelerator.
    torch.accelerator.current_device_index = lambda: 0
    type(current_platform).set_device = classmethod(lambda cls, device: None)
