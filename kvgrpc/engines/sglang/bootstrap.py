"""The registry in SGLang's main process, where other backends have their bootstrap server."""

from __future__ import annotations

from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer

from kvgrpc.engines.addresses import bracketed
from kvgrpc.engines.sglang.rank import external_registry
from kvgrpc.server import RegistryServer, settings


class KvGrpcBootstrapServer(BaseKVBootstrapServer):
    """Serves the registry on SGLang's bootstrap port, or nothing where KVGRPC_REGISTRY names an external one.

    Raises AddressNotAllowed for a port that is taken, or plaintext that others reach.
    """

    def __init__(self, host: str, port: int) -> None:
        configured = settings()
        self._server: RegistryServer | None = None
        if not external_registry():
            self._server = RegistryServer(
                [f"{bracketed(host)}:{port}"],
                configured.get("server_security"),
                configured.get("lease_ttl", 10.0),
                call_limits=configured.get("call_limits"),
            ).open()
