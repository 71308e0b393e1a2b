"""One manager a scheduler process: opens the rank, and answers what SGLang asks about peers and held pages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.disaggregation.base.conn import BaseKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import get_mooncake_transfer_engine
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.runtime_context import get_device, get_disagg, get_parallel, get_serving, process_model_config
from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto

from kvgrpc.engines.addresses import bracketed, loopback_for
from kvgrpc.engines.compatibility import SGLANG, check
from kvgrpc.engines.identity import MODEL_NAME, identity
from kvgrpc.engines.sglang.held import RoomsAwaitingRelease
from kvgrpc.engines.sglang.limits import (
    check_supported,
    divides_heads_of_states,
    divides_layers,
    features_of,
    has,
    has_unified_pools,
    is_set,
    page_layout,
)
from kvgrpc.engines.sglang.rank import (
    STATE_A_REQUEST,
    SchedulerProcess,
    external_registry,
    pages_of_pools,
    rank_config,
    sent_page_bytes,
    state_names,
)
from kvgrpc.engines.sglang.stages.prefill import Stages
from kvgrpc.model import Layout, Role
from kvgrpc.server import open_rank

if TYPE_CHECKING:
    from kvgrpc.dataplane.base import DataPlane
    from kvgrpc.transfer import KVReceiver


class KvGrpcManager(BaseKVManager):
    """Made by SGLang once its KV pool stands; blocks until the rank is open, and raises where it cannot be.

    Everything after the constructor is called on the scheduler's thread and neither blocks nor raises.
    """

    supports_deferred_decode_kv_release = True
    enable_deferred_decode_kv_release = True

    def __init__(
        self, args: Any, disaggregation_mode: DisaggregationMode, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.kv_args = args
        self.prefill_info_table = EveryPrefill()
        self.external_registry = external_registry()
        self._state_names = state_names(args)
        self._held = RoomsAwaitingRelease()
        # Of the room whose sender or receiver SGLang is about to make; see samples.py.
        self.attempt = 0
        role = Role.PREFILL if disaggregation_mode is DisaggregationMode.PREFILL else Role.DECODE
        # Where half of the layers keep states SGLang says only there that the others keep latents (Kimi Linear).
        latents = bool(is_mla_backend) or bool(getattr(args, "is_hybrid_mla_backend", False))
        check_supported(args, latents)
        check(SGLANG, *features_of(args, latents))
        place = _place(role, args, latents)
        # SGLang's word: of prefill's context parallel (CP) ranks it counts the bytes of the first, which sends.
        self.is_dummy_cp_rank = role is Role.PREFILL and place.cp > 0
        # That a page number stands for: of decode context parallel (DCP) ranks each has some of them.
        self.page_tokens = args.page_size * place.dcp_size
        config = rank_config(args, place, _shared_plane(place.local_ip))
        self._page_bytes = sent_page_bytes(args, config.pools, place)
        self.rank = open_rank(config)
        # A PrefillManager or a DecodeManager, as the class that SGLang makes on this one expects.
        self.transfer: Any = self.rank.transfer
        # Of prefill's pipeline; None without one.
        self.stages = _stages(self.transfer) if role is Role.PREFILL and get_parallel().pp_size > 1 else None

    def register_to_bootstrap(self) -> None:
        """The rank registers itself, and again whenever its registry was restarted."""

    def pages_of_pools(self, kv: Any, states: Sequence[Any] | None) -> Any:
        """Pages as our ends take them. ``states``: of the pools besides the KV cache; None before the last chunk."""
        return pages_of_pools(self._state_names, kv, states)

    def bytes_of(self, pages: Any) -> int:
        """Of what this rank sends of pages as ``pages_of_pools`` gives them, in all layers."""
        if not self._state_names:
            return len(pages) * self._page_bytes["kv"]
        return sum(len(numbers) * self._page_bytes[name] for name, numbers in pages.items())

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Always known; see EveryPrefill."""
        return True

    # Decode: pages of failed requests, which SGLang keeps until every rank says that nobody writes to them any more.

    def defer_release(self, room: int, receiver: KVReceiver) -> None:
        self._held.add(room, receiver)

    def is_abort_release_safe(self, room: int, required_acks: int) -> bool:
        return self._held.safe(room)

    def clear_deferred_abort_state(self, room: int) -> None:
        self._held.clear(room)

    def submit_prefill_recompute(self, receiver: Any, payload: Any) -> None:
        """A retracted request would use its room again, which names one hand-off for good."""
        receiver.abort("kvgrpc does not serve retraction with recompute at prefill")


@dataclass(frozen=True, slots=True)
class _Prefill:
    dp_size: int = 2**63
    follow_bootstrap_room: bool = True


class EveryPrefill:
    """The facts of a prefill engine that SGLang wants before it makes a receiver: how many dp ranks there are.

    It would wait for the answer, a second at a time. The receiver finds out by itself, in the background, so SGLang is
    told of more dp ranks than there are rooms: its own rule, room % dp_size, then hands the room itself to
    ``receiver.init``, which reads it as "by the room". A dp rank of the router's choice comes through as it is.
    """

    def get(self, bootstrap_addr: str) -> _Prefill:
        return _Prefill()


def _place(role: Role, kv_args: Any, mla: bool) -> SchedulerProcess:
    parallel, serving, disagg = get_parallel(), get_serving(), get_disagg()
    model = process_model_config()
    name = os.environ.get(MODEL_NAME, "")
    attention_dp = parallel.attn_dp_size > 1
    head = NetworkAddress.parse(parallel.dist_init_addr).resolved().host if parallel.dist_init_addr else serving.host
    dp_size = parallel.attn_dp_size if attention_dp else parallel.dp_size
    pp, cp, tp = _axes()
    return SchedulerProcess(
        role=role,
        layout=Layout(dp=dp_size, pp=pp.size, cp=cp.size, tp=tp.size),
        dp=parallel.attn_dp_rank if attention_dp else parallel.dp_rank or 0,
        tp=tp.rank,
        host=serving.host,
        local_ip=get_local_ip_auto(loopback_for(serving.host)),
        port=disagg.disaggregation_bootstrap_port if role is Role.PREFILL else serving.port,
        bootstrap=f"{bracketed(loopback_for(head))}:{disagg.disaggregation_bootstrap_port}",
        device=get_device().device,
        engine_selects_dp=role is Role.PREFILL and _engine_selects_dp(),
        model=identity(model.model_path, model.revision, kv_args.kv_cache_dtype_str, model.dtype, mla, name),
        kv_heads=0 if mla else model.get_total_num_kv_heads(),
        page_layout=page_layout(),
        pp=pp.rank,
        cp=cp.rank,
        has_all_heads=divides_heads_of_states(),
        has_unified_memory=has_unified_pools(kv_args),
        dcp=has(parallel, "attn_dcp_rank", 0),
        dcp_size=has(parallel, "attn_dcp_size", 1),
        first_layer=_first_layer(kv_args, model.num_hidden_layers),
        **(_state_form(model.hf_config) if STATE_A_REQUEST in state_names(kv_args) else {}),
    )


class _Axis(NamedTuple):
    rank: int
    size: int


def _axes() -> tuple[_Axis, _Axis, _Axis]:
    """Returns where this process is along pp, cp and tp, as far as its cache goes.

    Context parallel ranks that have some layers each hand them over as pipeline stages do, those that have some heads
    of states each as tensor-parallel ranks do: SGLang has no others then.
    """
    parallel = get_parallel()
    pp, cp = _Axis(parallel.pp_rank, parallel.pp_size), _Axis(parallel.attn_cp_rank, parallel.attn_cp_size)
    tp = _Axis(parallel.attn_tp_rank, parallel.attn_tp_size)
    if divides_heads_of_states():
        return pp, _Axis(0, 1), cp
    return (cp, _Axis(0, 1), tp) if divides_layers() else (pp, cp, tp)


def _state_form(config: Any) -> dict[str, str]:
    """The types of the convolutions and of what the recurrence keeps, and how the former lie: sizes tell neither."""
    from sglang.srt.configs.mamba_utils import mamba2_state_dtype
    from sglang.srt.utils import cpu_has_amx_support

    device, found = get_device().device, mamba2_state_dtype(config)
    turned = "amx" if device == "cpu" and cpu_has_amx_support() else "npu" if device == "npu" else "plain"
    dtypes = ",".join(str(each).removeprefix("torch.") for each in (found.conv, found.temporal))
    return {"state_dtype": dtypes, "state_axes": f"convolution:{turned}"}


def _first_layer(kv_args: Any, layers: int) -> int:
    """The first layer of this pipeline stage. Prefill is told; decode counts as SGLang does."""
    parallel = get_parallel()
    if parallel.pp_size == 1 and not divides_layers():
        return 0
    told = getattr(kv_args, "prefill_start_layer", None)
    return int(get_pp_indices(layers, parallel.pp_rank, parallel.pp_size)[0] if told is None else told)


def _stages(transfer: Any) -> Stages:
    """Waits until all stages of the engine have come so far, as SGLang's own backends do."""
    from sglang.srt.disaggregation.pp_consensus_store import PPConsensusStore

    parallel = get_parallel()
    store = PPConsensusStore(parallel.pp_size, parallel.pp_rank, parallel.pp_group)
    return Stages(store, parallel.pp_rank == 0, transfer.fileno())


def _engine_selects_dp() -> bool:
    """True if the dp controller of this engine has a mind of its own; SGLang's decode would ask for each room then."""
    follows = get_parallel().load_balance_method == "follow_bootstrap_room"
    return not follows or is_set("SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK")


def _shared_plane(host: str) -> DataPlane | None:
    """SGLang's own Mooncake engine, where it has started one; a second one would need its own ports and memory."""
    shared = get_mooncake_transfer_engine()
    if shared is None:
        return None
    from kvgrpc.dataplane.mooncake.plane import MooncakeDataPlane

    return MooncakeDataPlane.of(shared.engine, host)
