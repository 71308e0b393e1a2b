"""The storage backend ``nixl``: the files of the backend ``file``, and NIXL moves the bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from kvgrpc.errors import FeatureDisabled
from kvgrpc.prefetch.storage.base import Seconds
from kvgrpc.prefetch.storage.file.backend import FileBackend, FileConfig
from kvgrpc.prefetch.storage.nixl.agent import NixlMover
from kvgrpc.settings import read

_INSTALL = "pip install 'kvgrpc[nixl]'"


class NixlConfig(FileConfig, frozen=True, kw_only=True):
    """Config of the backend ``nixl``: that of ``file``, and:"""

    transfer_timeout: Seconds = 30.0
    """Of one page in NIXL: then it is abandoned, and the page fails."""


class NixlBackend(FileBackend):
    """A StorageBackend whose folder ``file`` can open too, and the other way round."""

    name = "nixl"

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> NixlBackend:
        """Raises InvalidRequest as ``file`` does, and FeatureDisabled where NIXL is not installed or does not start."""
        config = read(NixlConfig, settings)
        if importlib.util.find_spec("nixl") is None:
            raise _disabled("needs NIXL", _INSTALL)
        try:
            mover = NixlMover(config.transfer_timeout)
        except Exception as error:  # a missing library, a kernel without asynchronous I/O: NIXL's errors share no class
            raise _disabled(f"does not start ({type(error).__name__}: {error})", "use storage 'file'") from error
        try:
            return cls(config, mover)
        except BaseException:
            mover.close()
            raise


def _disabled(why: str, remedy: str) -> FeatureDisabled:
    return FeatureDisabled(
        f"storage 'nixl' {why}: {remedy}", metadata={"feature": "storage.nixl", "howToEnable": remedy}
    )
