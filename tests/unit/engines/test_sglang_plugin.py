"""The plug-in: which names lead to our classes, and that it ends the start rather than let SGLang go on without it."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.engines.compatibility import HAND_OFFS, SGLANG
from kvgrpc.engines.sglang import EX_CONFIG, is_asked, is_chosen, plugin
from kvgrpc.engines.sglang.plugin import RELEASE_TIMEOUT, class_chooser, install, one_more, page_holder
from kvgrpc.errors import FeatureDisabled, InvalidRequest


class Backend(enum.Enum):
    MOONCAKE = "mooncake"
    FAKE = "fake"


class Kind(enum.Enum):
    KVARGS = "kvargs"
    SENDER = "sender"


def sglangs(backend: Backend, kind: Kind) -> str:
    return f"SGLang's {backend.value} {kind.value}"


def backends(choose: Callable[[], None]) -> type[enum.Enum]:
    """SGLang's, as our hook answers for those that it does not know."""

    class Backends(enum.Enum):
        MOONCAKE = "mooncake"
        NIXL = "nixl"

        @classmethod
        def _missing_(cls, value: object) -> Any:
            return hook(super()._missing_, value)

    hook = one_more(lambda: Backends, "kvgrpc", choose)
    return Backends


def test_the_new_backend_is_found_by_its_name_beside_the_old_ones_and_chosen_once() -> None:
    chosen: list[str] = []
    found = backends(lambda: chosen.append("kvgrpc"))
    assert [found(name).name for name in ("mooncake", "nixl")] == ["MOONCAKE", "NIXL"]
    with pytest.raises(ValueError, match="'ours' is not a valid"):
        found("ours")
    assert chosen == []
    ours = found("kvgrpc")
    assert (ours.name, ours.value, type(ours)) == ("KVGRPC", "kvgrpc", found)
    assert found("kvgrpc") is ours and ours not in list(found) and chosen == ["kvgrpc"]


def test_a_choice_that_is_refused_is_refused_each_time() -> None:
    def refuse() -> None:
        raise FeatureDisabled("it lacks something")

    found = backends(refuse)
    for _ in range(2):
        with pytest.raises(FeatureDisabled, match="lacks something"):
            found("kvgrpc")


@pytest.mark.parametrize(("backend", "kind"), [(Backend.FAKE, Kind.SENDER), (Backend.MOONCAKE, Kind.KVARGS)])
def test_warm_up_classes_and_sglangs_container_stay_sglangs(backend: Backend, kind: Kind) -> None:
    assert class_chooser("mooncake")(sglangs, backend, kind) == sglangs(backend, kind)


def test_sglang_is_looked_at_once_and_not_with_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request asked for 10 to 20 ms of the scheduler's thread else: most tokens that a busy decode lost to us."""
    for module, name in (
        ("bootstrap", "KvGrpcBootstrapServer"),
        ("manager", "KvGrpcManager"),
        ("receiver", "KvGrpcReceiver"),
        ("sender", "KvGrpcSender"),
    ):
        monkeypatch.setitem(sys.modules, f"kvgrpc.engines.sglang.{module}", SimpleNamespace(**{name: name}))
    looks: list[object] = []
    monkeypatch.setattr(plugin, "check", lambda *what: looks.append(what))
    choose = class_chooser("mooncake")
    assert [choose(sglangs, Backend.MOONCAKE, Kind.SENDER) for _ in range(3)] == ["KvGrpcSender"] * 3
    assert looks == [(SGLANG, HAND_OFFS)]


@pytest.mark.parametrize(
    ("serves", "operators", "seconds"),
    [("kvgrpc", {}, "3600"), ("kvgrpc", {RELEASE_TIMEOUT: "90"}, "90"), ("mooncake", {}, None)],
    ids=["ours", "set by the operator", "another backend"],
)
def test_pages_of_a_failed_request_are_held_until_nobody_writes_to_them_unless_the_operator_set_a_time(
    monkeypatch: pytest.MonkeyPatch, serves: str, operators: dict[str, str], seconds: str | None
) -> None:
    context = SimpleNamespace(get_disagg=lambda: SimpleNamespace(disaggregation_transfer_backend=serves))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    environment = dict(operators)
    page_holder("kvgrpc", environment)("SGLang's queue", scheduler=None)
    assert environment.get(RELEASE_TIMEOUT) == seconds


@pytest.mark.parametrize(
    ("environment", "arguments", "asked", "chosen"),
    [
        ({}, ["launch_server", "--model-path", "/models/kvgrpc-llama"], False, False),
        ({"KVGRPC_SGLANG": "off"}, [], False, False),
        ({"KVGRPC_SGLANG": "mooncake"}, [], True, True),
        ({"KVGRPC_SGLANG": "backend"}, [], True, True),
        ({}, ["--disaggregation-transfer-backend", "kvgrpc"], True, True),
        ({}, ["--disaggregation-transfer-backend=kvgrpc"], True, True),
        ({}, ["--kv-events-config", '{"publisher": "kvgrpc"}'], True, False),
        ({"KVGRPC_CACHE_LISTEN": "127.0.0.1:0"}, [], True, False),
    ],
)
def test_somebody_asks_for_kvgrpc_by_the_route_or_by_its_name_and_chooses_the_backend(
    environment: dict[str, str], arguments: list[str], asked: bool, chosen: bool
) -> None:
    assert (is_asked(environment, arguments), is_chosen(environment, arguments)) == (asked, chosen)


def test_beside_an_sglang_that_lacks_what_it_needs_it_is_not_in_the_way_of_those_who_do_not_ask() -> None:
    """There is no SGLang at all here."""
    done = start()
    assert (done.returncode, done.stdout, done.stderr) == (0, "SGLang goes on\n", "")


def test_who_asks_for_it_there_is_told_what_is_missing_and_what_to_do() -> None:
    done = start("--disaggregation-transfer-backend", "kvgrpc")
    assert (done.returncode, done.stdout) == (EX_CONFIG, "")
    assert "it has no sglang.srt.plugins.hook_registry.HookRegistry.register; install sglang==" in done.stderr


def test_an_unknown_route_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="KVGRPC_SGLANG: must be backend, mooncake or off"):
        install({"KVGRPC_SGLANG": "nixl"})


def test_a_plug_in_that_cannot_work_ends_the_process_with_one_line() -> None:
    done = start(KVGRPC_SGLANG="nixl")
    assert done.returncode == EX_CONFIG
    assert done.stderr.startswith("kvgrpc cannot serve this SGLang: ") and done.stderr.count("\n") == 1
    assert "SGLang goes on" not in done.stdout


def test_switched_off_it_does_nothing() -> None:
    done = start(KVGRPC_SGLANG="off")
    assert (done.returncode, done.stdout, done.stderr) == (0, "SGLang goes on\n", "")


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that loads the plug-in as SGLang does."""
    script = "from kvgrpc.engines.sglang import register; register(); print('SGLang goes on')"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=50,
    )
