"""Context parallel (CP) ranks that have some layers each, byte by byte: our managers over SGLang's own pools of DSA.

SGLang's attention for this is for GPUs; no engine is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.utils import DisaggregationMode, get_kv_transfer_buf_infos, setup_state_kv_args
from sglang.srt.mem_cache import dsa_cache_layer_split, memory_pool

from kvgrpc.client import SyncClient
from kvgrpc.engines.sglang.receiver import KvGrpcReceiver
from kvgrpc.engines.sglang.sender import KvGrpcSender
from kvgrpc.server import KVPoll, RegistryServer
from tests.engines.scheduler_process import Process
from tests.support.waiting import wait_until

ROOM = 7
PAGE, PAGES = 64, 9
# Of these layers the first three are the first rank's. Some have no index keys of their own.
SKIPPED = [False, True, False, True, False]
LAYERS = len(SKIPPED)


def pool_of(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> Any:
    """SGLang's pool of this CP rank, or of a rank that has all layers, with other bytes everywhere."""
    alone = SimpleNamespace(attn_dcp_size=1, attn_cp_group=SimpleNamespace(world_size=1))
    share = {"layer_shard_rank": rank, "layer_shard_size": ranks} if ranks > 1 else {}
    made = dsa_cache_layer_split.LayerSplitDSATokenToKVPool if share else memory_pool.DSATokenToKVPool
    with monkeypatch.context() as patch:
        for module in (dsa_cache_layer_split, memory_pool):
            patch.setattr(module, "get_parallel", lambda: alone)
        pool = made(
            (PAGES - 1) * PAGE,
            page_size=PAGE,
            kv_lora_rank=24,
            dtype=torch.bfloat16,
            qk_rope_head_dim=8,
            layer_num=LAYERS,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=32,
            skip_topk_layers=SKIPPED,
            **share,
        )
    draw = np.random.default_rng(rank)
    for pages in (*latents(pool), *index_keys(pool)):
        pages[:] = draw.integers(1, 256, pages.shape, np.uint8)
    return pool


def latents(pool: Any) -> list[Any]:
    """Of each layer uint8[pages, bytes]; no pages of a layer that the rank does not have."""
    return [layer.view(torch.uint8).numpy().reshape(-1, PAGE * 64) for layer in pool.kv_buffer]


def index_keys(pool: Any) -> list[Any]:
    return [layer.numpy() for layer in pool.index_k_with_scale_buffer]


class DsaProcess(Process):
    """Over a pool of SGLang's, which it describes itself as in ``PrefillBootstrapQueue._init_kv_manager``."""

    def __init__(self, pool: Any, *arguments: Any, **more: Any) -> None:
        self.pool = pool
        self.parallel = {"enable_dsa_cache_layer_split": hasattr(pool, "layer_shard_start")}
        super().__init__(*arguments, mla=True, **more)

    def _args(self) -> Any:
        pool, args = self.pool, super()._args()
        args.page_size = pool.page_size
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = get_kv_transfer_buf_infos(pool)
        args.prefill_start_layer = getattr(pool, "layer_shard_start", pool.start_layer)
        setup_state_kv_args(args, pool)
        return args


Pair = tuple[list[DsaProcess], list[DsaProcess]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, own_registry: RegistryServer) -> Iterator[Callable[[int, int], Pair]]:
    """Opens so many CP ranks of prefill, and so many tensor-parallel ranks of decode."""
    port = int(own_registry.address.rpartition(":")[2])
    found: list[DsaProcess] = []

    def opened(cps: int, tps: int) -> Pair:
        for cp in range(cps):
            pool = pool_of(monkeypatch, cp, cps)
            found.append(DsaProcess(pool, monkeypatch, DisaggregationMode.PREFILL, port, cp=cp, cps=cps))
        for tp in range(tps):
            pool = pool_of(monkeypatch, 100 + tp, 1)
            found.append(DsaProcess(pool, monkeypatch, DisaggregationMode.DECODE, port, tp=tp, tps=tps))
        return found[:cps], found[cps:]

    yield opened
    for process in found:
        process.close()


@pytest.mark.parametrize("tps", [1, 2])
@pytest.mark.parametrize("cps", [2, 3])
def test_each_rank_hands_over_its_layers(
    opened: Callable[[int, int], Pair], own_registry: RegistryServer, cps: int, tps: int
) -> None:
    prefill, decode = opened(cps, tps)
    theirs, states = [4, 8, 6], [3, 5]
    expected = [[[pages.copy() for pages in of(rank.pool)] for of in (latents, index_keys)] for rank in decode]
    senders = [KvGrpcSender(rank.manager, "", ROOM) for rank in prefill]
    receivers = [KvGrpcReceiver(rank.manager, own_registry.address, ROOM) for rank in decode]
    for receiver in receivers:
        receiver.init(ROOM)
        receiver.send_metadata(np.array(theirs, np.int32), 2, [np.array(states, np.int32)], decode_prefix_len=PAGE)
    wait_until(lambda: min(sender.poll() for sender in senders) is KVPoll.WaitingForInput)
    assert [sender.pop_decode_prefix_len() for sender in senders] == [PAGE] * cps
    for cp, (rank, sender) in enumerate(zip(prefill, senders, strict=True)):
        rank.aux[:] = 7
        ours, own_states = np.roll([1, 2, 3], cp).astype(np.int32), np.roll([7, 1], cp).astype(np.int32)
        sender.init(3, 1)
        sender.send(ours[:1])
        sender.send(ours[1:], [own_states])
        for kinds in expected:
            for kind, of, to, places in zip(
                kinds, (latents, index_keys), (theirs, states), (ours, own_states), strict=True
            ):
                for its, mine in zip(kind, of(rank.pool), strict=True):
                    if len(mine) and len(its):
                        its[to] = mine[places]
    wait_until(lambda: {each.poll() for each in senders} | {each.poll() for each in receivers} == {KVPoll.Success})
    for rank, (kv, keys) in zip(decode, expected, strict=True):
        assert [len(layer) for layer in keys] == [0 if skipped else PAGES for skipped in SKIPPED]
        for layer in range(LAYERS):
            assert np.array_equal(latents(rank.pool)[layer], kv[layer]), layer
            assert np.array_equal(index_keys(rank.pool)[layer], keys[layer]), layer
        assert rank.aux[2].tolist() == [7] * 64


def test_they_are_stages_of_which_sglang_counts_the_bytes_of_each(
    opened: Callable[[int, int], Pair], own_registry: RegistryServer
) -> None:
    prefill, _ = opened(2, 0)
    with SyncClient(own_registry.address) as client:
        (engine,) = client.list_engines(include_rows=True)
    assert (engine.layout.pp, engine.layout.cp) == (2, 1)
    assert [rank.manager.is_dummy_cp_rank for rank in prefill] == [False, False]
    assert [rank.manager.stages for rank in prefill] == [None, None], "SGLang's CP ranks agree among themselves"
