"""What an adapter needs of its engine is found by looking, once somebody asks; a version alone refuses nobody."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import metadata

import pytest

from kvgrpc.engines import compatibility
from kvgrpc.engines.compatibility import (
    ENGINES,
    EVENTS,
    HAND_OFFS,
    SGLANG,
    TENSOR_PARALLEL,
    VLLM,
    Engine,
    check,
    is_tried,
    missing,
)
from kvgrpc.errors import FeatureDisabled


def engine(**needs: str) -> Engine:
    names = {name.replace("__", "."): words for name, words in needs.items()}
    return replace(SGLANG, needs=dict.fromkeys((HAND_OFFS, TENSOR_PARALLEL, EVENTS), names))


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.9.0")
    monkeypatch.setattr(compatibility, "_warned", set())


def test_a_version_that_was_never_tried_is_told_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        check(engine(os__path__join="a p"), HAND_OFFS)
    (said,) = caplog.messages
    assert "SGLang 0.9.0 was never tried" in said and "0.5.23" in said


def test_of_a_version_that_was_never_tried_no_feature_is_told_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for features in ((HAND_OFFS,), (HAND_OFFS, TENSOR_PARALLEL), (EVENTS,)):
        check(engine(), *features)
    assert len(caplog.messages) == 1


def test_features_that_were_never_run_with_a_version_are_told_once_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.21")
    check(engine(), HAND_OFFS)
    assert caplog.messages == []
    for _ in range(2):
        check(engine(), HAND_OFFS, TENSOR_PARALLEL, EVENTS)
    (said,) = caplog.messages
    assert said.startswith("kvgrpc: tensor parallelism, KV events: never run with SGLang 0.5.21, but with 0.5.23; ")


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_with_the_newest_version_every_feature_was_run(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    newest = ENGINES[name].newest
    monkeypatch.setattr(metadata, "version", lambda name: newest)
    monkeypatch.setattr(compatibility, "missing", lambda needs: iter(()))
    check(ENGINES[name], *ENGINES[name].needs)
    assert caplog.messages == []


def test_a_build_for_other_hardware_is_the_release_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.33.0+cu130")
    assert is_tried(VLLM, EVENTS)


def test_a_parameter_that_came_beside_those_that_are_needed_refuses_nobody() -> None:
    check(engine(os__path__join="a"), HAND_OFFS)


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"os__path__gone": ""}, r"it has no os\.path\.gone"),
        ({"no_such_module__thing": ""}, r"it has no no_such_module\.thing"),
        ({"os__path__join": "a layers"}, r"os\.path\.join has no layers"),
        ({"threading__Thread": "start banana"}, r"threading\.Thread has no banana"),
    ],
    ids=["a name", "a module", "a parameter", "a method"],
)
def test_what_is_missing_is_refused_by_its_name_with_the_version_and_the_remedy(
    needs: dict[str, str], said: str
) -> None:
    with pytest.raises(FeatureDisabled, match=rf"SGLang 0\.9\.0: {said}; install sglang==0\.5\.23 .* another transfer"):
        check(engine(**needs), HAND_OFFS)


def test_a_module_that_fails_while_it_is_loaded_is_no_surprise(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise RuntimeError("no GPU")

    monkeypatch.setattr("kvgrpc.engines.compatibility.pkgutil.resolve_name", fails)
    assert list(missing({"sglang.thing": ""})) == ["sglang.thing cannot be loaded: RuntimeError('no GPU')"]


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_table_names_things_of_its_own_engine(name: str) -> None:
    tables = ENGINES[name].needs.values()
    assert all(each.split(".")[0] == name for table in tables for each in table)
    run = ENGINES[name].tried.values()
    assert all(set(features) <= set(ENGINES[name].needs) for features in run)
