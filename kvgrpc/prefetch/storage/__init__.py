"""Storage for pages that leave host memory: ``base`` says what a backend is, ``open_backend`` opens one by its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvgrpc.errors import FeatureDisabled, InvalidRequest

if TYPE_CHECKING:
    from kvgrpc.prefetch.storage.base import StorageBackend

NAMES = ("file", "mooncake", "nixl", "hf3fs")
ENTRY_POINTS = "kvgrpc.storage"
_MAX_CONFIG_BYTES = 1 << 20


def open_backend(name: str, config: Mapping[str, object] | str | None = None) -> StorageBackend:
    """Opens a storage backend: "file", "mooncake", "nixl", "hf3fs", or one of the entry points ``kvgrpc.storage``.

    ``config``: a mapping, JSON text of one, or "@" and the path of a file that holds such JSON. docs/storage.md has the
    keys. An entry point is a callable that takes the mapping and returns a StorageBackend. Raises InvalidRequest for an
    unknown name or a config that is not right, and FeatureDisabled with the remedy where a package is missing.
    """
    settings = read_config(config)
    if name == "file":
        from kvgrpc.prefetch.storage.file.backend import FileBackend

        return FileBackend.of(settings)
    if name == "mooncake":
        from kvgrpc.prefetch.storage.mooncake.backend import MooncakeBackend

        return MooncakeBackend.of(settings)
    if name == "nixl":
        from kvgrpc.prefetch.storage.nixl.backend import NixlBackend

        return NixlBackend.of(settings)
    if name == "hf3fs":
        from kvgrpc.prefetch.storage.hf3fs.backend import Hf3fsBackend

        return Hf3fsBackend.of(settings)
    found = {each.name: each for each in metadata.entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join((*NAMES, *sorted(found)))
        raise InvalidRequest.of("storage_backend", name, f"one of {known} (entry points of {ENTRY_POINTS!r} count)")
    try:
        make = cast("Callable[[Mapping[str, object]], StorageBackend]", found[name].load())
    except (ImportError, AttributeError) as error:
        remedy = f"repair or remove the package that offers {found[name].value}"
        raise FeatureDisabled(
            f"storage backend {name!r} cannot be loaded ({error}): {remedy}",
            metadata={"feature": f"storage.{name}", "howToEnable": remedy},
        ) from error
    return make(settings)


def read_config(config: Mapping[str, object] | str | None) -> dict[str, object]:
    """The mapping that ``open_backend`` was given in one of its three ways. Raises InvalidRequest."""
    if config is None:
        return {}
    if not isinstance(config, str):
        return dict(config)
    text, source = config, "text"
    if config.startswith("@"):
        text, source = _text_of(config[1:]), config
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidRequest.of("storage_config", text, f"JSON ({source}: {error})") from None
    if not isinstance(found, dict):
        raise InvalidRequest.of("storage_config", text, f"a JSON object ({source})")
    return found


def _text_of(path: str) -> str:
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest.of("storage_config", f"@{path}", f"a readable file ({error})") from None
    if len(text) > _MAX_CONFIG_BYTES:
        raise InvalidRequest.of("storage_config", f"@{path}", f"a file of at most {_MAX_CONFIG_BYTES} characters")
    return text
