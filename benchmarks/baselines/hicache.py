"""What SGLang 0.5.23's own storage backend of files (``HiCacheFile``) does for a page, where SGLang is not installed.

A file a page in one folder, raw bytes, no checksum, no bound on the disk: its calls, and torch's, without its classes.
``make bench-sglang`` has the class itself in this place.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from typing import Any

SUFFIX = "_bench_0_1"


class TensorFiles:
    """Pages are tensors of bytes in memory."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def exists(self, key: str) -> bool:
        return os.path.exists(self._path(key))

    def set(self, key: str, value: Any) -> bool:
        import torch

        path = self._path(key)
        if self.exists(key):
            return True
        temporary = os.path.join(self._folder, f".{uuid.uuid4().hex}.tmp")
        value.contiguous().view(dtype=torch.uint8).numpy().tofile(temporary)
        os.replace(temporary, path)
        return True

    def get(self, key: str, target: Any) -> Any:
        import torch

        expected = target.numel() * target.element_size()
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                if file.readinto(memoryview(target.view(torch.uint8).contiguous().numpy())) != expected:
                    raise OSError(f"short read of {key}")
        except FileNotFoundError:
            return None
        return target

    def batch_get(self, keys: Sequence[str], targets: Sequence[Any]) -> list[Any]:
        return [self.get(key, target) for key, target in zip(keys, targets, strict=True)]

    def clear(self) -> None:
        shutil.rmtree(self._folder)
        os.makedirs(self._folder)

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, f"{key}{SUFFIX}.bin")
