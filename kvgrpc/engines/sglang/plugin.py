"""The names of SGLang that lead to our classes, and the hooks for that."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, MutableMapping
from typing import Any

from kvgrpc.engines.compatibility import DECODE_STAGES, EVENTS, HAND_OFFS, ORDERS, SGLANG, check, missing, refusal
from kvgrpc.engines.sglang import CACHE_LISTEN
from kvgrpc.engines.sglang.cache.hooks import register_orders
from kvgrpc.engines.sglang.samples import counting, naming_attempt, numbered
from kvgrpc.engines.sglang.stages.decode import ending, over
from kvgrpc.errors import InvalidRequest

ROUTE = "KVGRPC_SGLANG"
BACKEND = "kvgrpc"
_UTILS = "sglang.srt.disaggregation.utils"
_DECODE_QUEUE = "sglang.srt.disaggregation.decode.DecodeTransferQueue.__init__"
RELEASE_TIMEOUT = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
_HOLD_SECONDS = 3600
_ONE_OF_BATCH = "sglang.srt.managers.io_struct.GenerateReqInput.__getitem__"
_NEW_RID = "sglang.srt.managers.io_struct.GenerateReqInput.regenerate_rid"
_MAKE_ENDS = (
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue",
)
_STAGES = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
_HOOKED = (
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.arg_groups.choices.add_disagg_transfer_backend_choices",
    f"{_UTILS}.TransferBackend",
    f"{_UTILS}.get_kv_class",
    _DECODE_QUEUE,
    _ONE_OF_BATCH,
    _NEW_RID,
    *_MAKE_ENDS,
)


def install(environment: MutableMapping[str, str]) -> None:
    """Registers the hooks; SGLang applies them when all its plug-ins ran.

    ``KVGRPC_SGLANG`` in the environment: "backend" (the default) adds the transfer backend "kvgrpc"; "mooncake" takes
    the place of SGLang's own Mooncake backend, for the features of SGLang that ask for that name; "off" does nothing.
    Raises FeatureDisabled for an SGLang that lacks what the names themselves need, and with "mooncake", where nobody
    would notice that it is SGLang's own, for one that lacks anything; InvalidRequest for another route.
    """
    route = environment.get(ROUTE, "backend")
    if route == "off":
        return
    if route not in ("backend", "mooncake"):
        raise InvalidRequest.of(ROUTE, route, "backend, mooncake or off")
    if route == "mooncake":
        check(SGLANG, HAND_OFFS)
    for gone in missing({name: SGLANG.needs[HAND_OFFS][name] for name in _HOOKED}):
        raise refusal(SGLANG, gone)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if route == "backend":
        from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
        from sglang.srt.disaggregation.utils import TransferBackend

        add_disagg_transfer_backend_choices([BACKEND])
        HookRegistry.register(f"{_UTILS}.TransferBackend", with_member(TransferBackend, BACKEND), HookType.REPLACE)
    _register_publisher()
    if environment.get(CACHE_LISTEN):
        check(SGLANG, ORDERS)
        register_orders(environment[CACHE_LISTEN], HookRegistry, HookType)
    ours = BACKEND if route == "backend" else "mooncake"
    HookRegistry.register(f"{_UTILS}.get_kv_class", class_chooser(ours), HookType.AROUND)
    HookRegistry.register(_DECODE_QUEUE, page_holder(ours, environment), HookType.BEFORE)
    HookRegistry.register(_ONE_OF_BATCH, counting(lambda: serves(ours)), HookType.AFTER)
    HookRegistry.register(_NEW_RID, numbered, HookType.AROUND)
    for makes in _MAKE_ENDS:
        HookRegistry.register(makes, naming_attempt, HookType.AROUND)
    if not any(missing(SGLANG.needs[DECODE_STAGES])):  # without, the manager refuses them
        is_ours = functools.partial(serves, ours)
        HookRegistry.register(f"{_STAGES}._pp_pd_get_decode_transferred_ids", over(is_ours), HookType.AROUND)
        HookRegistry.register(f"{_STAGES}.process_decode_transfer_queue", ending(is_ours), HookType.AROUND)


def _register_publisher() -> None:
    """A publisher of KV events is another feature: an SGLang without it refuses the name where somebody says it."""
    if any(missing(SGLANG.needs[EVENTS])):
        return
    from kvgrpc.engines.sglang.events import register_publisher

    register_publisher()


def with_member(backends: type[enum.Enum], name: str) -> type[enum.Enum]:
    """The same enumeration with one member more; an enumeration that has members cannot be extended."""
    members = {member.name: member.value for member in backends}
    return enum.Enum(backends.__name__, {**members, name.upper(): name})  # type: ignore[return-value]


def class_chooser(backend: str) -> Callable[..., Any]:
    """A hook around SGLang's ``get_kv_class``: our classes for ``backend``, SGLang's for everything else.

    SGLang asks for its FAKE sender and receiver for warm-up and health requests and pairs them with our manager. The
    first question for ours is where this SGLang is looked at. Raises FeatureDisabled for one that lacks what they need.
    """
    # SGLang asks with each request, on its scheduler's thread, and to look takes 10 ms.
    ours: Callable[[], dict[str, type]] = functools.cache(_classes)

    def get_kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
        if transfer_backend.value != backend or class_type.value == "kvargs":
            return original(transfer_backend, class_type)
        return ours()[class_type.value]

    return get_kv_class


def page_holder(backend: str, environment: MutableMapping[str, str]) -> Callable[..., None]:
    """A hook before SGLang makes decode's queue of transfers, which reads there how long it holds pages of a request
    that failed: until nobody writes to them, where the operator has set no time and ``backend`` serves this engine.

    SGLang's 30 s are for its own backends, whose acknowledgement may never come; a prefill that hangs for longer and
    then goes on would write over the pages of other requests. Ours says when it is over: an hour is the last resort.
    """

    def hold_pages(*arguments: Any, **more: Any) -> None:
        if serves(backend):
            environment.setdefault(RELEASE_TIMEOUT, str(_HOLD_SECONDS))

    return hold_pages


def serves(backend: str) -> bool:
    """True if that is the transfer backend of this engine."""
    from sglang.srt.runtime_context import get_disagg

    return bool(get_disagg().disaggregation_transfer_backend == backend)


def _classes() -> dict[str, type]:
    check(SGLANG, HAND_OFFS)
    from kvgrpc.engines.sglang.bootstrap import KvGrpcBootstrapServer
    from kvgrpc.engines.sglang.manager import KvGrpcManager
    from kvgrpc.engines.sglang.receiver import KvGrpcReceiver
    from kvgrpc.engines.sglang.sender import KvGrpcSender

    return {
        "manager": KvGrpcManager,
        "sender": KvGrpcSender,
        "receiver": KvGrpcReceiver,
        "bootstrap_server": KvGrpcBootstrapServer,
    }
