"""The parts of CUDA that a CPU has not: streams, events and pinned memory. On a CPU all is done when it is called."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from kvgrpc.errors import CopyFailed
from kvgrpc.prefetch.pools.host import Bytes, HostPool


class Mark(Protocol):
    """A point in a stream of work."""

    def wait_here(self) -> None:
        """Blocks this thread until the work before it is done."""

    def wait_on_stream(self) -> None:
        """Makes what this thread queues from now on come after it; does not block."""


class CopyLane(Protocol):
    """A queue of work of its own on a device."""

    def current(self) -> AbstractContextManager[Any]:
        """Work inside goes to this lane."""

    def fence(self) -> Mark:
        """A mark behind all that the calling thread has queued so far on its own stream."""

    def mark(self) -> Mark:
        """A mark behind all that this lane has so far."""


class _Done:
    def wait_here(self) -> None:
        """A CPU had done it before it came back."""

    def wait_on_stream(self) -> None:
        """A CPU had done it before any stream could wait."""


class CpuLane:
    """See ``CopyLane``, on a machine without an accelerator: a copy has ended when its call returns."""

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def fence(self) -> Mark:
        return _Done()

    def mark(self) -> Mark:
        return _Done()


class _Event:
    def __init__(self, event: Any, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait_here(self) -> None:
        self._event.synchronize()

    def wait_on_stream(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaLane:
    """See ``CopyLane``: a CUDA stream of its own on ``device``; raises what torch raises."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)  # type: ignore[no-any-return]

    def fence(self) -> Mark:
        return _Event(torch.cuda.current_stream(self._device).record_event(), self._device)

    def mark(self) -> Mark:
        return _Event(self._stream.record_event(), self._device)


def open_lane(device: torch.device) -> CopyLane:
    return CudaLane(device) if device.type == "cuda" else CpuLane()


def pin(host: HostPool, device: torch.device) -> bool:
    """Page-locks the host pool for copies of ``device``; False where nothing has to be. Raises CopyFailed."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # to which it is mapped as well
        code = int(torch.cuda.cudart().cudaHostRegister(host.address, host.nbytes, 0))
    if code:
        raise CopyFailed(
            f"{host.nbytes} bytes of host memory cannot be page-locked (CUDA error {code}): allow more locked memory "
            "(ulimit -l), or make the pool smaller",
            metadata={"direction": "pin", "layer": ""},
        )
    return True


def unpin(host: HostPool) -> None:
    torch.cuda.cudart().cudaHostUnregister(host.address)


def seen_by(device: torch.device, memory: Bytes) -> Tensor:
    """Memory of a host pool as a tensor of ``device``, whose kernels read and write it where it lies. On CUDA it is
    page-locked first, and not used once it is not. Raises CopyFailed."""
    if device.type != "cuda":
        return torch.from_numpy(memory)
    seen = torch.as_tensor(_Mapped(memory), device=device)
    if seen.data_ptr() != memory.ctypes.data:
        raise CopyFailed(
            f"{device} sees a copy of the host pool and not its memory", metadata={"direction": "pin", "layer": ""}
        )
    return seen


class _Mapped:
    """Page-locked memory has one address for the host and for the device."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": memory.shape,
            "typestr": "|u1",
            "data": (int(memory.ctypes.data), False),
            "version": 3,
        }
