"""A backend is opened by its name; a config that is not right says which key, and what would be right."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.prefetch.storage import open_backend, read_config


def test_config_is_a_mapping_json_or_a_file(tmp_path: Path) -> None:
    config = {"path": str(tmp_path / "pages"), "max_bytes": "1.5GiB"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (config, json.dumps(config), f"@{tmp_path}/config.json"):
        backend = open_backend("file", given)
        assert backend.stats().capacity == 3 << 29
        assert backend.close(10)
    assert read_config(None) == read_config("") == {}


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("flie", {}, "storage_backend: must be one of file, mooncake"),
        ("file", "{", "storage_config: must be JSON"),
        ("file", "[1]", "storage_config: must be a JSON object"),
        ("file", "@/nowhere/config.json", "storage_config: must be a readable file"),
        ("file", {}, "path: must be given (text)"),
        ("file", {"path": "/tmp/x", "max_size": 1}, "max_size: must be one of the settings checksum, direct"),
        ("file", {"path": "/tmp/x", "max_bytes": "many"}, "max_bytes: must be a number of bytes"),
        ("file", {"path": "/tmp/x", "max_bytes": -1}, "max_bytes: must be a whole number, at least 0, not -1"),
        ("file", {"path": "/tmp/x", "threads": 0}, "threads: must be a whole number, 1 to 64, not 0"),
        ("file", {"path": "/tmp/x", "direct": "yes"}, "direct: must be true or false, not 'yes'"),
        ("file", {"path": "/tmp/x", "format": "raw"}, "format: must be kvgrpc or sglang, not 'raw'"),
        ("file", {"path": "/proc/nowhere"}, "path: must be a folder that this process may write to"),
        (
            "nixl",
            {"path": "/tmp/x", "transfer_timeout": 0},
            "transfer_timeout: must be a number, above 0, at most 3600, not 0",
        ),
        ("mooncake", {}, "master: must be given (text)"),
        ("mooncake", {"master": "nonsense"}, "master: must be HOST:PORT"),
        (
            "mooncake",
            {"master": "h:1", "namespace": "a/b"},
            "namespace: must be text of the form ^[A-Za-z0-9_-]{0,64}$, not 'a/b'",
        ),
    ],
)
def test_a_config_that_is_not_right_is_refused(name: str, config: object, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_backend(name, config)  # type: ignore[arg-type]
    assert words in refused.value.message


def test_a_third_party_backend_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = [
        metadata.EntryPoint("dictionary", "tests.support.faults.storage:from_config", "kvgrpc.storage"),
        metadata.EntryPoint("broken", "tests.support.faults.nowhere:from_config", "kvgrpc.storage"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: offered if group == "kvgrpc.storage" else [])
    backend = open_backend("dictionary", '{"threads": 1}')
    assert backend.name == "dictionary" and backend.close(10)
    with pytest.raises(FeatureDisabled, match="cannot be loaded"):
        open_backend("broken")
    with pytest.raises(InvalidRequest, match="one of file, mooncake, nixl, hf3fs, broken, dictionary"):
        open_backend("other")
