"""A scheduler process of SGLang without an engine: our manager over made-up pools and SGLang's real modules."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.utils import DisaggregationMode

from kvgrpc.engines.sglang import limits, manager
from kvgrpc.engines.sglang.manager import KvGrpcManager

LOCAL = "127.0.0.1"
PAGES, PAGE_BYTES, PAGE = 12, 192, 16
REQUESTS, STATE_BYTES = 6, 80


class Process:
    """A scheduler process of SGLang with its own memory, K and V of a layer, and our manager in it."""

    memory: Mapping[str, bool] = {}
    parallel: Mapping[str, bool] = {}
    page_bytes, state_bytes = PAGE_BYTES, STATE_BYTES

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        mode: DisaggregationMode,
        port: int,
        *,
        cp: int = 0,
        cps: int = 1,
        tp: int = 0,
        tps: int = 1,
        dcps: int = 1,
        mla: bool = False,
        has_states: bool = False,
    ) -> None:
        self.states = [np.zeros((REQUESTS, self.state_bytes), np.uint8)] if has_states else []
        self.kv = [np.zeros((PAGES, self.page_bytes), np.uint8) for _ in range(2)]
        self.aux = np.zeros((4, 64), np.uint8)
        parallel = {
            **dict.fromkeys(("pp_size", "attn_dp_size", "dp_size"), 1),
            **dict.fromkeys(("pp_rank", "attn_dp_rank", "dp_rank"), 0),
            **{"attn_cp_size": cps, "attn_cp_rank": cp, "attn_tp_size": tps, "attn_tp_rank": tp},
            **{"attn_dcp_size": dcps, "attn_dcp_rank": tp % dcps, "dist_init_addr": None},
            "load_balance_method": "follow_bootstrap_room",
            **self.parallel,
        }
        disagg = {
            "disaggregation_mode": mode.value,
            "disaggregation_bootstrap_port": port,
            "disaggregation_transfer_backend": "kvgrpc",
        }
        model = SimpleNamespace(
            model_path="a/model",
            revision=None,
            dtype="bfloat16",
            num_hidden_layers=1,
            hf_config=None,
            get_total_num_kv_heads=lambda: 8,
        )
        settings = {
            "get_parallel": parallel,
            "get_disagg": disagg,
            "get_serving": {"host": LOCAL, "port": 1, "tokenizer_worker_num": 1},
            "get_device": {"device": "cpu"},
            "get_memory": self.memory,
            "get_spec": {},
            "get_exec": {"features": SimpleNamespace(enable_memory_saver=False)},
        }
        with monkeypatch.context() as patch:
            for name, values in settings.items():
                for module in (limits, manager):
                    if hasattr(module, name):
                        patch.setattr(module, name, lambda values=values: SimpleNamespace(**values))
            patch.setattr(manager, "process_model_config", lambda: model)
            patch.setattr(manager, "_state_form", lambda config: {"state_dtype": "float32", "state_axes": "plain"})
            patch.setenv(limits.UNTRIED, ",".join((limits.CONTEXT, limits.DCP, limits.UNIFIED, "dsa")))
            self.manager: Any = KvGrpcManager(self._args(), mode, None, mla)

    def _args(self) -> Any:
        return SimpleNamespace(
            page_size=PAGE,
            kv_cache_dtype_str="bfloat16",
            gpu_id=0,
            state_types=[StateType.MAMBA] * len(self.states),
            state_data_ptrs=[[array.ctypes.data] for array in self.states],
            state_data_lens=[[array.nbytes] for array in self.states],
            state_item_lens=[[self.state_bytes] for _ in self.states],
            kv_data_ptrs=[array.ctypes.data for array in self.kv],
            kv_data_lens=[array.nbytes for array in self.kv],
            kv_item_lens=[self.page_bytes] * len(self.kv),
            aux_data_ptrs=[self.aux.ctypes.data],
            aux_data_lens=[self.aux.nbytes],
            aux_item_lens=[self.aux.shape[1]],
        )

    def close(self) -> None:
        self.manager.rank.close()
