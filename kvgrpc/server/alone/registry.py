"""A registry that runs alone: ``kvgrpc serve registry``."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import grpc

import kvgrpc
from kvgrpc.errors import InvalidRequest
from kvgrpc.net import check_advertised
from kvgrpc.registry.servicer import RegistryServicer, add_registry_to_server
from kvgrpc.registry.store.base import Store
from kvgrpc.registry.store.memory import MemoryStore
from kvgrpc.rpc.interceptors import Admission, CallLimits
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.server.alone.serving import ServerAlone
from kvgrpc.server.check import check_lease_ttl
from kvgrpc.server.port.callers import CallersHere
from kvgrpc.server.port.description import ServerInfo, limits_to_pb
from kvgrpc.server.port.listener import Listener
from kvgrpc.server.port.servicer import ServerServicer
from kvgrpc.v1.server_service_pb2 import ServerLimits
from kvgrpc.v1.server_service_pb2_grpc import add_ServerServiceServicer_to_server

logger = logging.getLogger(__name__)

_SERVICES = ("kvgrpc.v1.RegistryService", "kvgrpc.v1.ServerService")


class RegistryServer(ServerAlone):
    """A registry on a port of its own. ``open`` and ``close`` block; ``address`` and ``metrics_address`` are as bound.

    ``metrics_listen``: "host:port" of ``/metrics``, ``/livez`` and ``/readyz``; empty: none. ``store``: where the rows
    are; in its own memory unless given, with leases of ``lease_ttl`` seconds. ``call_limits``: how many calls run at
    once, of all callers and of one. Raises InvalidRequest for what is no address, for a ``lease_ttl`` outside 1 to 600
    and for a limit below 1.
    """

    _servicer: RegistryServicer

    def __init__(
        self,
        listen: Sequence[str],
        security: ServerSecurity | None = None,
        lease_ttl: float = 10.0,
        metrics_listen: str = "",
        store: Store | None = None,
        call_limits: CallLimits | None = None,
    ) -> None:
        check_lease_ttl(lease_ttl)
        super().__init__(listen, security, metrics_listen, call_limits)
        self._servicer = RegistryServicer(store or MemoryStore(ttl=lease_ttl))
        checks = {_SERVICES[0]: lambda: self._servicer.healthy}
        self._listener = Listener(checks, Admission(self._call_limits))

    async def drain(self, grace: float) -> tuple[bool, int]:
        if self.address:
            logger.info("the registry at %s drains", self.address)
        return await super().drain(grace)

    def _live(self) -> dict[str, bool]:
        return {"loop": self._loop.healthy, "registry": self._closing or self._servicer.healthy}

    async def _open(self) -> None:
        await self._servicer.start()
        bound = await self._listener.start(self._add_servicers, self._listen, self._security)
        self.address = bound[0]

    async def _close(self) -> None:
        await self.drain(0.0)
        await self._listener.stop(1.0)
        await self._servicer.close()

    def _add_servicers(self, server: grpc.aio.Server) -> Sequence[str]:
        add_registry_to_server(self._servicer, server)
        limits = ServerLimits(calls=limits_to_pb(self._call_limits), registry=self._servicer.limits)
        callers = CallersHere(self._listener.admission, [self._servicer.readers], self._servicer.store.rows_by_owner)
        info = ServerInfo(version=kvgrpc.__version__, services=_SERVICES, limits=limits, security=self._security)
        add_ServerServiceServicer_to_server(
            ServerServicer(info, self, lambda: self._listener.draining, callers), server
        )
        return _SERVICES


def etcd_store(endpoints: Sequence[str], ttl: float, prefix: str, security: ClientSecurity | None) -> Store:
    """The store over etcd: all registries over one cluster and prefix are one registry.

    ``endpoints``: members of the cluster, "host:port"; ``ttl``: seconds of a lease. Raises InvalidRequest for an
    endpoint without a port, a prefix that is none, and a ``ttl`` outside 1 to 600.
    """
    from kvgrpc.registry.store.etcd import EtcdStore
    from kvgrpc.registry.store.etcd.store import DEFAULT_PREFIX

    check_lease_ttl(ttl)
    for endpoint in endpoints:
        check_advertised(endpoint, field="etcd", peer_is_local=True)
    prefix = prefix or DEFAULT_PREFIX
    if not prefix.isascii() or not prefix.endswith("/"):
        raise InvalidRequest.of("etcd_prefix", prefix, 'ASCII text that ends in "/"')
    return EtcdStore(endpoints, ttl=ttl, prefix=prefix, security=security)
