"""SGLang's own classes behind the common face: its Mooncake manager, sender, receiver and bootstrap server, as the
wheel has them, without an engine. In an environment of tests/engines only.

``plane`` "null" puts an engine that moves nothing in the place of Mooncake's, as on the other sides.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

# Before the import, which reads it: everything is on this host.
os.environ.setdefault("SGLANG_HOST_IP", "127.0.0.1")

import numpy as np
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.mooncake.conn import (
    MooncakeKVBootstrapServer,
    MooncakeKVManager,
    MooncakeKVReceiver,
    MooncakeKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.device_communicators import mooncake_transfer_engine as shared_engine
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import get_free_port

from benchmarks.baselines.engines import Engine, MooncakeEngine, NullEngine
from benchmarks.sides.base import Pages, Setting
from benchmarks.sides.memory import Memory

HOST = "127.0.0.1"
PAGE_TOKENS = 16
RESOLVED_WITHIN = 20.0


class SglangPrefill:
    """Bootstrap server and prefill manager in one process. Closed, its thread that takes messages waits for ever, as in
    an engine that has no role switch: with one it would look each half second.
    """

    page_type = np.int32

    def __init__(self, setting: Setting) -> None:
        port = get_free_port()
        arguments = _publish("prefill", port)
        self.bootstrap = f"{HOST}:{port}"
        self._server = MooncakeKVBootstrapServer(HOST, port)
        engine, self.memory = _start_engine(setting)
        self._engine = engine
        self._manager = MooncakeKVManager(
            _kv_args(self.memory), DisaggregationMode.PREFILL, arguments, _is_flat(setting)
        )

    def sender(self, room: int) -> Sender:
        return Sender(self._manager, self.bootstrap, room)

    def close(self) -> None:
        self.memory.forget()
        for queue in self._manager.transfer_queues:
            queue.put(None)
        self._server.close()
        self._engine.close()


class SglangDecode:
    """A decode manager."""

    page_type = np.int32

    def __init__(self, setting: Setting, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        arguments = _publish("decode", get_free_port())
        self._engine, self.memory = _start_engine(setting)
        self._manager = MooncakeKVManager(
            _kv_args(self.memory), DisaggregationMode.DECODE, arguments, _is_flat(setting)
        )

    def receiver(self, room: int, bootstrap: str | None = None) -> Receiver:
        return Receiver(self._manager, bootstrap or self._bootstrap, room)

    def settled(self, receivers: Sequence[Receiver]) -> bool:
        return True  # what its constructor does is over when it returns

    def close(self) -> None:
        self.memory.forget()
        MooncakeKVReceiver.close_all_sockets()
        self._manager._heartbeat_shutdown.set()
        self._engine.close()


class Sender:
    """See benchmarks.sides.base.Sender."""

    __slots__ = ("_sender",)

    def __init__(self, manager: Any, bootstrap: str, room: int) -> None:
        self._sender = MooncakeKVSender(manager, bootstrap, room)

    def init(self, num_pages: int, aux_index: int | None = None) -> None:
        self._sender.init(num_pages, aux_index)

    def send(self, pages: Pages, index_slice: slice, is_last: bool) -> None:
        self._sender.send(pages)

    def poll(self) -> int:
        return int(self._sender.poll())

    def close(self) -> None:
        self._sender.clear()


class Receiver:
    """See benchmarks.sides.base.Receiver. Made as SGLang's decode queue makes it: the topology first, which is asked
    for once, then the handle with its way to prefill.
    """

    __slots__ = ("_receiver",)

    def __init__(self, manager: Any, bootstrap: str, room: int) -> None:
        end = time.monotonic() + RESOLVED_WITHIN
        while not manager.try_ensure_parallel_info(bootstrap):
            if time.monotonic() > end:
                raise TimeoutError(f"{bootstrap} did not say its topology within {RESOLVED_WITHIN:g} s")
            time.sleep(0.001)
        self._receiver = MooncakeKVReceiver(manager, bootstrap, room)
        self._receiver.init(0)

    def init(self, pages: Pages, aux_index: int) -> None:
        self._receiver.send_metadata(pages, aux_index)

    def poll(self) -> int:
        return int(self._receiver.poll())

    def close(self) -> None:
        self._receiver.clear()


class SharedEngine:
    """What SGLang's manager calls of its shared Mooncake engine, over the engines of the other baseline."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Transfers are put into queues by the sum of the ports.
        self._session = engine.session_id if ":" in engine.session_id else f"{HOST}:{get_free_port()}"
        self._raw = getattr(engine, "raw", None)

    def batch_register(self, addresses: list[int], lengths: list[int]) -> int:
        for address, nbytes in zip(addresses, lengths, strict=True):
            self._engine.register(address, nbytes)
        return 0

    def batch_deregister(self, addresses: list[int]) -> int:
        return 0

    def batch_transfer_sync(self, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        if self._raw is None:
            return 0
        return int(self._raw.batch_transfer_sync_write(session, sources, targets, lengths))

    def transfer_sync(self, session: str, source: int, target: int, nbytes: int) -> int:
        return self._engine.transfer_sync(session, source, target, nbytes)

    def get_session_id(self) -> str:
        return self._session

    def send_probe(self, session: str) -> int:
        return 0


def _publish(mode: Literal["prefill", "decode"], port: int) -> Any:
    """The configuration of this process: one rank of tensor parallelism 1."""
    arguments = ServerArgs(
        model_path="dummy",
        host=HOST,
        device="cpu",
        page_size=PAGE_TOKENS,
        disaggregation_mode=mode,
        disaggregation_bootstrap_port=port,
        disaggregation_transfer_backend="mooncake",
    )
    context = publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    context.parallel.override_permanently(pp_group=SimpleNamespace(world_size=1, rank_in_group=0))
    return arguments


def _start_engine(setting: Setting) -> tuple[Engine, Memory]:
    engine: Engine = NullEngine() if setting.plane == "null" else MooncakeEngine()
    shared_engine._mooncake_transfer_engine = SharedEngine(engine)
    return engine, Memory(setting.shape, engine.allocate)


def _is_flat(setting: Setting) -> bool:
    """Regions are halves of keys and values, unless they are odd in number: then as of one latent cache a layer."""
    return setting.shape.regions % 2 == 1


def _kv_args(memory: Memory) -> KVArgs:
    shape, args = memory.shape, KVArgs()
    args.engine_rank = args.pp_rank = args.gpu_id = args.system_dp_rank = 0
    args.rust_http_port, args.kv_layout, args.ib_device = None, None, ""
    args.kv_cache_dtype_str, args.page_size = "bfloat16", PAGE_TOKENS
    args.kv_data_ptrs = list(memory.regions)
    args.kv_data_lens = [shape.region_bytes] * shape.regions
    args.kv_item_lens = [shape.page_bytes] * shape.regions
    args.kv_layer_ids, args.num_draft_entries = [], 0
    args.prefill_start_layer, args.prefill_end_layer = 0, None
    args.kv_head_num = args.total_kv_head_num = 1
    args.aux_data_ptrs = [memory.aux]
    args.aux_data_lens = [shape.aux_items * shape.aux_item_bytes]
    args.aux_item_lens = [shape.aux_item_bytes]
    args.state_types, args.state_data_ptrs, args.state_data_lens = [], [], []
    args.state_item_lens, args.state_layer_ids, args.state_dim_per_tensor = [], [], []
    args.state_slice_outer_counts, args.state_conv_shard_groups = [], []
    args.is_hybrid_mla_backend, args.swa_kv_cache_layout, args.mla_compression_ratios = False, None, None
    return args


assert (KVPoll.Failed, KVPoll.Success) == (0, 4), "the harness compares these numbers"
