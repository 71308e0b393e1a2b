"""Where a rank calls: its registry, those that requests name, and other ranks; which proof goes with each call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import grpc

from kvgrpc.errors import CredentialsInvalid
from kvgrpc.model import RankId, Role
from kvgrpc.net import AddressPolicy, BootstrapAddress, parse_bootstrap_addr, replicas
from kvgrpc.registry.client.following import Following
from kvgrpc.registry.client.resolver import Resolver
from kvgrpc.registry.model import RankSelector
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.server.config import RankConfig
from kvgrpc.transfer.layout.topology import layers_of_pools, stages_of
from kvgrpc.transfer.protocol.types import Target
from kvgrpc.transfer.runtime.resolve import PrefillEngine

# For a registry to name the successor of a rank that is dead; it may have died with it.
_AT_ONCE_SECONDS = 1.0
# A registry of one prefill lives in it. It may be late; who does not listen for so long is gone, with its rooms.
REFUSED_SECONDS = 5.0


class RankCalls:
    """Of one rank, whose address ``own_address`` says once it is bound."""

    def __init__(self, config: RankConfig, own_address: Callable[[], str]) -> None:
        self._config = config
        self._own_address = own_address
        self._policy = AddressPolicy(config.bootstrap_allow, _configured(config.registry))
        self.resolver = Resolver(self.to_a_registry)
        self.following = Following(self.to_a_registry)

    async def resolve(self, bootstrap_addr: str, decode: RankId, at_once: bool = False) -> PrefillEngine:
        """The registry behind a request's address, if this rank may dial it (contract section 4)."""
        address = parse_bootstrap_addr(bootstrap_addr)
        self._policy.check(address)
        asked = address.target, address.engine, Role.PREFILL
        resolve = partial(
            self.resolver.resolve, *asked, wait_ready=not at_once, refused_for=self._refused_seconds(address)
        )
        timeout = min(_AT_ONCE_SECONDS, self._config.resolve_timeout) if at_once else self._config.resolve_timeout
        try:
            engine = await resolve([RankSelector(pp=decode.pp)], timeout)
        except CredentialsInvalid as error:
            if self._trusts(address.target):
                raise
            raise CredentialsInvalid(
                f"{error.message}; nothing was sent, because only a request named {address.target}: list its host in "
                "bootstrap_allow (KVGRPC_BOOTSTRAP_ALLOW) if it is to be trusted",
                metadata=error.metadata,
            ) from None
        mine, theirs = self._config.layout.pp, engine.layout.pp
        if mine != theirs and not (mine % theirs and theirs % mine):
            stages = stages_of(decode.pp, mine, theirs)
            selectors = [RankSelector(pp=pp) for pp in stages]
            engine = await resolve(selectors, timeout, with_pools=True)
        targets = {
            row.ref.rank[1:]: Target(row.ref, row.endpoints.grpc, engine.layout, layers_of_pools(row.pools) or None)
            for row in engine.rows
        }
        engine_selects_dp = any(row.engine_selects_dp for row in engine.rows)
        return PrefillEngine(engine.name, engine.layout, targets, engine_selects_dp)

    async def changes(self, bootstrap_addr: str, since: int, timeout: float) -> int:
        """Changes of the prefill engine behind a request's address, which ``resolve`` was allowed to dial."""
        address = parse_bootstrap_addr(bootstrap_addr)
        return await self.following.change(address.target, address.engine, Role.PREFILL, since, timeout)

    def _refused_seconds(self, address: BootstrapAddress) -> float:
        """For how long the address of a registry may refuse. One of many engines, which a request names with the engine
        or this rank's settings name, comes back; so does what has something before it that may refuse in its place.
        """
        is_of_many = address.engine or address.target in _configured(self._config.registry)
        return math.inf if is_of_many or not self._config.refusal_proves_death else REFUSED_SECONDS

    def to_anybody(self, address: str) -> grpc.aio.Channel:
        """To an address that the configuration or a registry named."""
        return open_channel(address, self._config.client_security, own_connection=True)

    def to_ourselves(self, address: str) -> grpc.aio.Channel:
        """It may be a wildcard, which is nobody's name."""
        security = replace(self._config.client_security, audience=self._own_address())
        return open_channel(address, security, own_connection=True)

    def to_a_registry(self, address: str) -> grpc.aio.Channel:
        """Nothing that a secret made goes where only a request said to go."""
        security = self._config.client_security
        if not self._trusts(address):
            security = replace(security, token="", token_file="")
        return open_channel(address, security, own_connection=True, seldom=True)

    def _trusts(self, registry: str) -> bool:
        return registry == self._own_address() or self._policy.trusts(registry)

    def to_a_rank(self, address: str) -> grpc.aio.Channel:
        """To a rank, which bears quicker pings than a registry does."""
        return open_channel(
            address, self._config.client_security, own_connection=True, pings=self._config.session_pings
        )


def _configured(registry: str) -> tuple[str, ...]:
    return () if registry in ("", "embedded") else tuple(replicas(registry))
