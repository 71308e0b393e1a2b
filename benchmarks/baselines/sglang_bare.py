"""The floor of a hand-off between SGLang engines: a transfer backend that is a TCP socket and nothing else.

One prefill, one decode, tensor parallelism 1. No registry, no session, no failure, no data plane: decode says which
pages it wants, prefill's scheduler thread sends their bytes, a thread at decode puts them in place. What is left is
the cost of SGLang's interfaces and of two Python processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

import numpy as np
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVPoll,
    KVTransferMetric,
)
from sglang.srt.disaggregation.utils import DisaggregationMode, TransferBackend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_disagg

from kvgrpc.engines.sglang.manager import EveryPrefill

BACKEND = "bare"
HEADER = struct.Struct("<QII")  # room, aux row, number of pages or bytes that follow


def install() -> None:
    """Adds the transfer backend "bare". Run by the stand-ins' plug-in where SGLANG_ON_CPU_PLUGIN names it."""
    add_backend(BACKEND, BareManager)


def add_backend(name: str, manager: type[BareManager]) -> None:
    """Adds a transfer backend of this manager and the handles below."""
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices

    utils = "sglang.srt.disaggregation.utils"
    add_disagg_transfer_backend_choices([name])
    HookRegistry.register(f"{utils}.TransferBackend", with_member(TransferBackend, name), HookType.REPLACE)
    HookRegistry.register(f"{utils}.get_kv_class", partial(_kv_class, name, manager), HookType.AROUND)


def with_member(backends: type[enum.Enum], name: str) -> type[enum.Enum]:
    """The same enumeration with one member more; an enumeration that has members cannot be extended."""
    members = {member.name: member.value for member in backends}
    return enum.Enum(backends.__name__, {**members, name.upper(): name})  # type: ignore[return-value]


class BareManager(BaseKVManager):
    """Prefill: listens where SGLang has its bootstrap server. Decode: dials at the first request."""

    is_dummy_cp_rank = False

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.kv_args = args
        self.prefill_info_table = EveryPrefill()
        self.wanted: dict[int, Any] = {}
        self.receivers: dict[int, BareReceiver] = {}
        self.start(disaggregation_mode is DisaggregationMode.PREFILL)

    def start(self, is_prefill: bool) -> None:
        self._prefill: socket.socket | None = None
        if is_prefill:
            server = socket.create_server(("127.0.0.1", get_disagg().disaggregation_bootstrap_port), reuse_port=True)
            _start(self._accept, server)

    def want(self, receiver: BareReceiver) -> None:
        """Decode, on its scheduler's thread: tells prefill into which pages."""
        header = HEADER.pack(receiver.bootstrap_room, receiver.aux_row, len(receiver.pages))
        self._dial(receiver.address).sendall(header + receiver.pages.tobytes())

    def give(self, sender: BareSender) -> None:
        """Prefill, on its scheduler's thread: sends what decode wants."""
        peer, _, _ = self.wanted.pop(sender.room)
        data = b"".join(ctypes.string_at(*row) for row in self.rows(sender.pages, sender.aux_row))
        peer.sendall(HEADER.pack(sender.room, 0, len(data)) + data)

    def is_given(self, sender: BareSender) -> bool:
        """At each poll after ``give``."""
        return True

    def give_way(self) -> None:
        """At each poll of an open room."""

    def register_to_bootstrap(self) -> None: ...

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        return True

    def rows(self, page: Any, aux_row: int) -> Iterator[tuple[int, int]]:
        """Address and bytes of each piece of a room, in the order in which they travel."""
        args = self.kv_args
        for address, nbytes in zip(args.kv_data_ptrs, args.kv_item_lens, strict=True):
            yield from ((address + int(number) * nbytes, nbytes) for number in page)
        for address, nbytes in zip(args.aux_data_ptrs, args.aux_item_lens, strict=True):
            yield address + aux_row * nbytes, nbytes

    def _dial(self, address: str) -> socket.socket:
        if self._prefill is None:
            host, _, port = address.rpartition(":")
            self._prefill = socket.create_connection((host, int(port)))
            self._prefill.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _start(self._receive, self._prefill)
        return self._prefill

    def _accept(self, server: socket.socket) -> None:
        while True:
            peer, _ = server.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _start(self._listen, peer)

    def _listen(self, peer: socket.socket) -> None:
        stream = peer.makefile("rb")
        while header := stream.read(HEADER.size):
            room, aux_row, pages = HEADER.unpack(header)
            self.wanted[room] = peer, np.frombuffer(stream.read(pages * 4), np.int32), aux_row

    def _receive(self, peer: socket.socket) -> None:
        stream = peer.makefile("rb")
        with contextlib.suppress(ConnectionResetError):  # prefill was ended
            self._put(stream)

    def _put(self, stream: BinaryIO) -> None:
        while header := stream.read(HEADER.size):
            room, _, nbytes = HEADER.unpack(header)
            receiver, data, offset = self.receivers.pop(room), stream.read(nbytes), 0
            for address, size in self.rows(receiver.pages, receiver.aux_row):
                ctypes.memmove(address, data[offset : offset + size], size)
                offset += size
            receiver.state = KVPoll.Success


class BareSender(BaseKVSender):
    def __init__(self, mgr: BareManager, bootstrap_addr: str, bootstrap_room: int, **ignored: Any) -> None:
        self.kv_mgr, self.room = mgr, bootstrap_room
        self.pages: list[Any] = []
        self.aux_row = 0
        self._sent, self._total = False, 0
        self._early_send_wait_event: Any = None

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self._total, self.aux_row = num_kv_indices, aux_index or 0

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None) -> None:
        self.pages.extend(kv_indices)
        if len(self.pages) == self._total:
            self.kv_mgr.give(self)
            self._sent = True

    def poll(self) -> int:
        self.kv_mgr.give_way()
        if self._sent:
            return int(KVPoll.Success if self.kv_mgr.is_given(self) else KVPoll.Transferring)
        known = self.room in self.kv_mgr.wanted
        return int(KVPoll.WaitingForInput if known else KVPoll.Bootstrapping)

    def failure_exception(self) -> None: ...

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric()


class BareReceiver(BaseKVReceiver):
    require_staging = False
    bootstrap_infos: tuple[()] = ()
    abort_notified = False

    def __init__(self, mgr: BareManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr, self.address, self.bootstrap_room = mgr, bootstrap_addr, bootstrap_room or 0
        self.state = KVPoll.Bootstrapping
        self.pages: Any = ()
        self.aux_row = 0

    def init(self, prefill_dp_rank: int) -> None:
        self.state = KVPoll.WaitingForInput

    def send_metadata(self, kv_indices: Any, aux_index: int | None = None, *unused: Any, **ignored: Any) -> None:
        self.pages, self.aux_row = kv_indices.astype(np.int32), aux_index or 0
        self.kv_mgr.receivers[self.bootstrap_room] = self
        self.kv_mgr.want(self)

    def poll(self) -> int:
        if self.state is not KVPoll.Success:
            self.kv_mgr.give_way()
        return int(self.state)

    def failure_exception(self) -> None: ...


class BareBootstrapServer(BaseKVBootstrapServer):
    def __init__(self, host: str, port: int) -> None: ...


def _kv_class(name: str, manager: type[BareManager], original: Any, transfer_backend: Any, class_type: Any) -> Any:
    classes = {
        "manager": manager,
        "sender": BareSender,
        "receiver": BareReceiver,
        "bootstrap_server": BareBootstrapServer,
    }
    if transfer_backend.value != name or class_type.value not in classes:
        return original(transfer_backend, class_type)
    return classes[class_type.value]


def _start(target: Any, *arguments: Any) -> None:
    threading.Thread(target=target, args=arguments, daemon=True).start()
