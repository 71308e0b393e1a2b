"""The names of SGLang that lead to our classes, and the hooks for that."""

from __future__ import annotations

import contextlib
import enum
import functools
import pkgutil
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from kvgrpc.engines.compatibility import (
    DECODE_STAGES,
    EVENTS,
    HAND_OFFS,
    ORDERS,
    SGLANG,
    WINDOWS,
    check,
    missing,
    refusal,
)
from kvgrpc.engines.sglang import CACHE_LISTEN, is_chosen, moves
from kvgrpc.engines.sglang.samples import counting, naming_attempt, numbered
from kvgrpc.errors import FeatureDisabled, InvalidRequest

ROUTE = "KVGRPC_SGLANG"
BACKEND = "kvgrpc"
_BACKENDS = "sglang.srt.disaggregation.utils.TransferBackend"
_GET_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
_DECODE_QUEUE = "sglang.srt.disaggregation.decode.DecodeTransferQueue.__init__"
RELEASE_TIMEOUT = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
_HOLD_SECONDS = 3600
_ONE_OF_BATCH = "sglang.srt.managers.io_struct.GenerateReqInput.__getitem__"
_NEW_RID = "sglang.srt.managers.io_struct.GenerateReqInput.regenerate_rid"
_MAKE_ENDS = (
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue",
)
_SETUP_STATES = "sglang.srt.disaggregation.utils.setup_state_kv_args"
_STAGES = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
_RUST = "SGLANG_RUST_SERVER"
_RUST_ASKS = "sglang.srt.managers.disagg_service.rust_server_serves_kv_bootstrap"
# Without these nobody can ask for us; and what is hooked where somebody does.
_NAMED = (
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.arg_groups.choices.add_disagg_transfer_backend_choices",
    _BACKENDS,
)
_HOOKED = (_GET_CLASS, _DECODE_QUEUE, _ONE_OF_BATCH, _NEW_RID, *_MAKE_ENDS)


def install(environment: MutableMapping[str, str], arguments: Sequence[str] = ()) -> None:
    """Makes our names known, and where somebody chooses our backend registers the hooks that it stands on; SGLang
    applies them when all its plug-ins ran.

    ``KVGRPC_SGLANG`` in the environment: "backend" (the default) adds the transfer backend "kvgrpc"; "mooncake" takes
    the place of SGLang's own Mooncake backend, for the features of SGLang that ask for that name; "off" does nothing.
    ``arguments``: of the command line.
    Raises FeatureDisabled for an SGLang that lacks what the names themselves need, and with "mooncake", where nobody
    would notice that it is SGLang's own, for one that lacks anything; InvalidRequest for another route.
    """
    route = environment.get(ROUTE, "backend")
    if route == "off":
        return
    if route not in ("backend", "mooncake"):
        raise InvalidRequest.of(ROUTE, route, "backend, mooncake or off")
    chosen = is_chosen(environment, arguments)
    if route == "mooncake":
        check(SGLANG, HAND_OFFS)
    _look_for(*_NAMED, *(_HOOKED if chosen else ()))
    if route == "backend":
        _add_name((lambda: None) if chosen else functools.partial(_hook_late, environment))
        if environment.get(_RUST) and not any(missing({_RUST_ASKS: ""})):
            _ask_before_rust()
    if chosen:
        _register(hooks(BACKEND if route == "backend" else "mooncake", environment))
    add_publisher()
    if environment.get(CACHE_LISTEN):
        check(SGLANG, ORDERS)
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from kvgrpc.engines.sglang.cache.hooks import register_orders

        register_orders(environment[CACHE_LISTEN], HookRegistry, HookType)


def _look_for(*names: str) -> None:
    for gone in missing({name: SGLANG.needs[HAND_OFFS][name] for name in names}):
        raise refusal(SGLANG, gone)


def _add_name(choose: Callable[[], None]) -> None:
    """``choose`` is called when SGLang first makes a backend of our name, before it does anything with it."""
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_disagg_transfer_backend_choices([BACKEND])
    HookRegistry.register(f"{_BACKENDS}._missing_", one_more(_backends, BACKEND, choose), HookType.AROUND)


def _backends() -> type[enum.Enum]:
    """Returns SGLang's enumeration as it is now; another plug-in may have replaced it."""
    return pkgutil.resolve_name(_BACKENDS)  # type: ignore[no-any-return]


def _ask_before_rust() -> None:
    """SGLang's Rust server takes hold of ``get_kv_class`` before it makes a backend of the name."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def make_backend(transfer_backend: str) -> None:
        _backends()(transfer_backend)

    HookRegistry.register(_RUST_ASKS, make_backend, HookType.BEFORE)


def one_more(backends: Callable[[], type[enum.Enum]], name: str, choose: Callable[[], None]) -> Callable[..., Any]:
    """A hook around ``_missing_`` of an enumeration, which Python asks for a value that no member has: one more of that
    name, made once. An enumeration that has members cannot be extended."""

    @functools.cache
    def ours() -> enum.Enum:
        choose()
        member: enum.Enum = object.__new__(backends())
        member._name_, member._value_ = name.upper(), name
        return member

    def missing_member(original: Callable[[object], Any], value: object) -> Any:
        return ours() if value == name else original(value)

    return missing_member


def hooks(backend: str, environment: MutableMapping[str, str]) -> Mapping[str, tuple[Callable[..., Any], str]]:
    """Returns, by the function of SGLang, our hook for hand-offs over ``backend`` and SGLang's name of its kind."""
    is_ours = functools.partial(serves, backend)
    found: dict[str, tuple[Callable[..., Any], str]] = {
        _GET_CLASS: (class_chooser(backend), "AROUND"),
        _DECODE_QUEUE: (page_holder(backend, environment), "BEFORE"),
        _ONE_OF_BATCH: (counting(is_ours), "AFTER"),
        _NEW_RID: (numbered, "AROUND"),
        **{makes: (naming_attempt, "AROUND") for makes in _MAKE_ENDS},
    }
    if not any(missing(SGLANG.needs[DECODE_STAGES])):  # without, the manager refuses them
        from kvgrpc.engines.sglang.stages.decode import ending, over

        found[f"{_STAGES}._pp_pd_get_decode_transferred_ids"] = over(is_ours), "AROUND"
        found[f"{_STAGES}.process_decode_transfer_queue"] = ending(is_ours), "AROUND"
    if not any(missing(moves.NEEDED)):  # without, the manager refuses that memory
        found[moves.GATE] = moves.waiting_for_releases(is_ours), "AROUND"
    if not any(missing(SGLANG.needs[WINDOWS])):
        from kvgrpc.engines.sglang.stages.layers import telling

        found[_SETUP_STATES] = telling(is_ours), "AFTER"
    return found


def _register(hooked: Mapping[str, tuple[Callable[..., Any], str]]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (hook, kind) in hooked.items():
        HookRegistry.register(target, hook, HookType[kind])


def _hook_late(environment: MutableMapping[str, str]) -> None:
    """The backend is chosen where no command line says so: in a file, or by SGLang's ``Engine`` in Python. SGLang has
    applied the hooks of all plug-ins by then, and adds none to a function that has some.

    Raises FeatureDisabled for an SGLang that lacks something, and where another plug-in has hooked the same.
    """
    check(SGLANG, HAND_OFFS)
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooked = hooks(BACKEND, environment)
    before = {target: pkgutil.resolve_name(target) for target in hooked}
    _register(hooked)
    HookRegistry.apply_hooks()
    for target, was in before.items():
        if pkgutil.resolve_name(target) is was:
            remedy = f"set {ROUTE}=backend"
            raise FeatureDisabled(
                f"kvgrpc came too late to {target}, which another plug-in has hooked; {remedy}",
                metadata={"feature": BACKEND, "howToEnable": remedy},
            )


def add_publisher() -> None:
    """A publisher of KV events is another feature: an SGLang without it refuses the name where somebody says it."""
    if any(missing(SGLANG.needs[EVENTS])):
        return
    from sglang.srt.disaggregation.kv_events import EventPublisherFactory

    with contextlib.suppress(KeyError):  # registered already
        EventPublisherFactory.register_publisher(BACKEND, publisher)


def publisher(**sglang: Any) -> Any:
    """Made by SGLang's scheduler, of its configuration. Raises what KvGrpcPublisher raises."""
    from kvgrpc.engines.sglang.events import KvGrpcPublisher

    return KvGrpcPublisher(**sglang)


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
