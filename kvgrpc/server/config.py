"""The configuration of a rank: what the engine knows of itself, and settings that also come from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvgrpc.dataplane.base import DataPlane
from kvgrpc.model import UNKNOWN_MODEL, Layout, ModelIdentity, Pool, RankId, Role
from kvgrpc.prefetch.config import PrefetchConfig
from kvgrpc.pull.model import PullConfig
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.rpc.options import Pings
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.settings import layered
from kvgrpc.transfer.aux import AuxBuffer
from kvgrpc.transfer.protocol.types import Bounds, Timing
from kvgrpc.transfer.runtime.manager import MAX_FRAME_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """One rank to open.

    Attributes:
        engine: name of the engine, stable over restarts.
        role: what the rank does.
        pools: its KV memory; addresses are this process's own.
        layout, dp, pp, cp, tp: sizes of the engine and coordinates of the rank, in KV coordinates.
        engine_rank: where the engine has one flat number instead of dp, pp, cp and tp: they are derived from it and the
            layout (``RankId.from_flat``); None: they are given.
        model: what the engine runs; ranks of different models never exchange a page.
        aux: the engine's aux buffers; none where the engine has none.
        data_plane: "mooncake", "shm", or one that was opened before (``kvgrpc.dataplane.open_plane``), whose
            ``allocate`` may have given the pools' memory; whoever opened it closes it, after the rank.
        device: RDMA devices for Mooncake, comma separated; empty: TCP where there are none.
        listen: "host:port" to bind; port 0 takes a free one.
        advertise: host, or "host:port", that peers dial; empty: as bound. Needed when listening on a wildcard.
        registry: where to register: "host:port" (several with commas: replicas over one store), "embedded" (this rank
            serves one on its own port), or "" for none.
        bootstrap_allow: hosts and CIDRs of registries that a request may name besides loopback and ``registry``.
        engine_selects_dp: the balancer of a prefill engine chooses the dp rank of a request, and not room % dp.
        events: configuration of KV events (None, a JSON string, a mapping or an object); None: off.
        prefetch: the hierarchical cache of this rank; None: it has none.
        pull: how that cache lends pages to other engines and takes theirs; None: it does neither.
        server_security, client_security: TLS, tokens; without them plaintext on loopback only.
        admin_listen: addresses that serve the same besides ``listen``, for people: "unix:/path".
        metrics_listen: "host:port" for Prometheus' ``/metrics`` and a kubelet's ``/livez`` and ``/readyz``, over HTTP;
            empty: none.
        refusal_proves_death: whether a dial that is refused proves that nobody writes at a prefill's address any more;
            False where a firewall, a proxy or a Service may refuse in its place: pages are held then until the
            prefill, or its next incarnation, answers.
        verify: whether a checksum of each page travels with a hand-off and is compared before decode says Success,
            where both sides are set so; memory of the CPU only, and some 1 GB/s of one core on either side.
        gather_bytes: memory of a prefill over TCP in which slices of pages are copied together for decode ranks of a
            larger tp, 4 MiB for each of them and taken when it comes; 0: each slice is a write (docs/topology.md).
        tracing: whether each hand-off is a span of OpenTelemetry; the engine sets up an SDK with its exporter
            (docs/operations.md), and without opentelemetry-api there is none.
        silent_timeout: seconds after which a peer whose connection stands and that says nothing is given up, with its
            rooms (its interpreter may be held, by a compiler for example); 0: ``timing.idle_timeout``, 60 s. Never
            longer than a room may take.
        start_timeout: seconds that opening may take, registration included.
        resolve_timeout: seconds that a receiver's registry may take to answer READY.
        lease_ttl: seconds, of an embedded registry.
        poll_gives_way: a poll of an open room lends the interpreter to kvgrpc's threads where they wait for it: 50 us
            at most, once in 200 us, and once after calls that gave them work; with at most 1,024 rooms open
            (docs/performance.md).
        switch_interval: seconds after which a thread that computes must hand the interpreter over, for all threads of
            the process (``sys.setswitchinterval``; Python's own is 0.005); 0 leaves it as it is. For engines that
            compute long between polls: 0.0001 takes 15 to 25 % of such a thread.
        call_limits: how many calls run at once at this rank's port, of all callers and of one.
    """

    engine: str
    role: Role
    pools: tuple[Pool, ...]
    layout: Layout = field(default_factory=Layout)
    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0
    engine_rank: int | None = None
    model: ModelIdentity = UNKNOWN_MODEL
    aux: tuple[AuxBuffer, ...] = ()
    data_plane: str | DataPlane = "mooncake"
    device: str = ""
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    registry: str = ""
    bootstrap_allow: tuple[str, ...] = ()
    engine_selects_dp: bool = False
    events: object = None
    prefetch: PrefetchConfig | None = None
    pull: PullConfig | None = None
    server_security: ServerSecurity = field(default_factory=ServerSecurity)
    client_security: ClientSecurity = field(default_factory=ClientSecurity)
    admin_listen: tuple[str, ...] = ()
    metrics_listen: str = ""
    refusal_proves_death: bool = True
    verify: bool = False
    gather_bytes: int = 64 << 20
    tracing: bool = False
    silent_timeout: float = 0.0
    start_timeout: float = 30.0
    resolve_timeout: float = 30.0
    lease_ttl: float = 10.0
    timing: Timing = field(default_factory=Timing)
    bounds: Bounds = field(default_factory=Bounds)
    max_frame_bytes: int = MAX_FRAME_BYTES
    poll_gives_way: bool = True
    switch_interval: float = 0.0
    call_limits: CallLimits = field(default_factory=CallLimits)

    @property
    def session_timing(self) -> Timing:
        """``timing`` with what has a setting of its own."""
        if not self.silent_timeout:
            return self.timing
        return replace(self.timing, idle_timeout=self.timing.ticks(round(self.silent_timeout * 1000)))

    @property
    def session_pings(self) -> Pings:
        """By which a session finds a peer stopped or cut off, within seconds (rule 3, break and loss)."""
        timing = self.session_timing
        return Pings(timing.milliseconds(timing.ping_interval), timing.milliseconds(timing.ping_timeout))

    @property
    def rank(self) -> RankId:
        if self.engine_rank is not None:
            return RankId.from_flat(self.engine, self.layout, self.engine_rank)
        return RankId(self.engine, self.dp, self.pp, self.cp, self.tp)


def settings(
    mapping: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Keyword arguments of RankConfig: from ``mapping``, else ``KVGRPC_<KEY>`` of the environment, else the TOML file
    that ``KVGRPC_CONFIG`` names (see ``kvgrpc.settings.layered``).

    TLS and tokens have flat keys: ``cert_file`` and ``key_file`` (the rank's own, on both sides), ``client_ca_file``,
    ``tokens_file`` and ``audience`` (who may call it, and by which names), ``ca_file``, ``token_file`` and
    ``server_name`` (whom it calls, and as whom), ``insecure``. Only keywords give what an engine alone knows: its
    memory and its coordinates. Raises InvalidRequest.
    """
    environment = os.environ if environment is None else environment
    given = dict(mapping or {})
    # What only an engine knows is taken as it is.
    own = {name: given.pop(name) for name in _OF_THE_ENGINE if name in given and not isinstance(given[name], str)}
    return _with_security(own | layered(KINDS, given, environment))


# Flat key -> fields of ServerSecurity, fields of ClientSecurity.
_SECURITY: dict[str, tuple[str, str]] = {
    "cert_file": ("cert_file", "cert_file"),
    "key_file": ("key_file", "key_file"),
    "client_ca_file": ("client_ca_file", ""),
    "tokens_file": ("token_file", ""),
    "ca_file": ("", "ca_file"),
    "token": ("", "token"),
    "token_file": ("", "token_file"),
    "server_name": ("", "server_name"),
    "audience": ("audience", ""),
    "health_without_token": ("health_without_token", ""),
    "insecure": ("insecure", "insecure"),
}


def _with_security(found: dict[str, Any]) -> dict[str, Any]:
    """Flat keys become the two security values; a server's own certificate is a client's only where it trusts a CA."""
    flat = {name: found.pop(name) for name in _SECURITY.keys() & found.keys()}
    server = {_SECURITY[name][0]: value for name, value in flat.items() if _SECURITY[name][0]}
    client = {_SECURITY[name][1]: value for name, value in flat.items() if _SECURITY[name][1]}
    if "ca_file" not in client:
        client.pop("cert_file", None)
        client.pop("key_file", None)
    if server:
        found.setdefault("server_security", ServerSecurity(**server))
    if client:
        found.setdefault("client_security", ClientSecurity(**client))
    return found


_OF_THE_ENGINE = frozenset({"pools", "layout", "dp", "pp", "cp", "tp", "engine_rank", "aux", "model"})
# What may be set, and what it is converted to.
KINDS: dict[str, Any] = {
    **dict.fromkeys(("engine", "device", "listen", "advertise", "registry", "metrics_listen"), str),
    **dict.fromkeys(("bootstrap_allow", "admin_listen"), tuple[str, ...]),
    **dict.fromkeys(("silent_timeout", "start_timeout", "resolve_timeout", "lease_ttl", "switch_interval"), float),
    **dict.fromkeys(_SECURITY, str),
    "audience": tuple[str, ...],
    **dict.fromkeys(
        (
            "insecure",
            "health_without_token",
            "refusal_proves_death",
            "engine_selects_dp",
            "poll_gives_way",
            "verify",
            "tracing",
        ),
        bool,
    ),
    **dict.fromkeys(("data_plane", "events", "server_security", "client_security"), object),
    **dict.fromkeys(("dp", "pp", "cp", "tp", "engine_rank", "max_frame_bytes", "gather_bytes"), int),
    "role": Role,
    "timing": Timing,
    "bounds": Bounds,
    "pull": PullConfig,
    "call_limits": CallLimits,
}
