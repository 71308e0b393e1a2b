"""The configuration of a rank: what the engine knows of itself, and settings that also come from the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from kvgrpc.dataplane.base import DataPlane
from kvgrpc.fields import Secret, bounded, kinds_of, least_above_zero, seconds
from kvgrpc.model import UNKNOWN_MODEL, Layout, ModelIdentity, Pool, RankId, RankRef, Role
from kvgrpc.prefetch.config import PrefetchConfig
from kvgrpc.prefetch.served import ServedCache
from kvgrpc.pull.model import PullConfig
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.rpc.options import MAX_MESSAGE_BYTES, Pings
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.settings import layered
from kvgrpc.transfer.aux_rows import AuxBuffer
from kvgrpc.transfer.protocol.types import Bounds, Timing
from kvgrpc.transfer.runtime.manager import MAX_FRAME_BYTES
from kvgrpc.transfer.runtime.writing.gather import BLOCK_BYTES

# Below it the names and pools of an ordinary Hello would not fit.
SMALLEST_FRAME_BYTES = 64 * 1024
FrameBytes = Annotated[int, bounded(least=SMALLEST_FRAME_BYTES, most=MAX_MESSAGE_BYTES, unit="bytes")]
LONGEST_TIMEOUT_SECONDS = 86_400.0
Timeout = Annotated[float, seconds(LONGEST_TIMEOUT_SECONDS)]
# A shorter one could not be renewed in time, nobody waits for the end of a longer one.
LeaseSeconds = Annotated[float, bounded(least=1.0, most=600.0, unit="seconds")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """One rank to open."""

    engine: str
    """Name of the engine, stable over restarts."""
    role: Role
    """What the rank does."""
    pools: tuple[Pool, ...]
    """Its KV memory; addresses are this process's own."""
    layout: Layout = field(default_factory=Layout)
    """Parallel sizes of the engine, in KV coordinates."""
    dp: int = 0
    """Coordinate of the rank among the data-parallel replicas."""
    pp: int = 0
    """Coordinate among the pipeline stages."""
    cp: int = 0
    """Coordinate among the context-parallel ranks."""
    tp: int = 0
    """Coordinate among the tensor-parallel ranks, in KV coordinates."""
    engine_rank: int | None = None
    """Where the engine has one flat number instead of dp, pp, cp and tp: they are derived from it and the layout
    (``RankId.from_flat``); None: they are given."""
    model: ModelIdentity = UNKNOWN_MODEL
    """What the engine runs; ranks of different models never exchange a page."""
    aux: tuple[AuxBuffer, ...] = ()
    """The engine's aux buffers; none where the engine has none."""
    data_plane: str | DataPlane = "mooncake"
    """ "mooncake", "shm", or one that was opened before (``kvgrpc.dataplane.open_plane``), whose ``allocate`` may have
    given the pools' memory; whoever opened it closes it, after the rank."""
    device: str = ""
    """RDMA devices for Mooncake, comma separated; empty: TCP where there are none."""
    listen: str = "127.0.0.1:0"
    """ "host:port" to bind; port 0 takes a free one."""
    advertise: str = ""
    """Host, or "host:port", that peers dial; empty: as bound. Needed when listening on a wildcard."""
    registry: str = ""
    """Where to register: "host:port" (several with commas: replicas over one store), "embedded" (this rank serves one
    on its own port), or "" for none."""
    bootstrap_allow: tuple[str, ...] = ()
    """Hosts and CIDRs of registries that a request may name besides loopback and ``registry``."""
    labels: tuple[str, ...] = ()
    """What the registry is to say of this rank to whoever chooses among engines, at most 16 times "NAME=VALUE"
    (zone=a). A router asks an index for the caches of ranks with some of them."""
    engine_selects_dp: bool = False
    """The balancer of a prefill engine chooses the dp rank of a request, and not room % dp."""
    events: object = None
    """Configuration of KV events (None, a JSON string, a mapping or an object); None: off."""
    prefetch: PrefetchConfig | None = None
    """The hierarchical cache of this rank; None: it has none."""
    pull: PullConfig | None = None
    """How that cache lends pages to other engines and takes theirs; None: it does neither."""
    cache: Callable[[RankRef], ServedCache] | None = None
    """Makes, for this rank's name and incarnation, the cache that the engine keeps itself, which is served in the place
    of ``prefetch``; None: there is none. An engine without hand-offs serves it with ``open_cache``."""
    server_security: Annotated[ServerSecurity, Secret] = field(default_factory=ServerSecurity)
    """TLS and tokens of the rank's port; without them plaintext on loopback only."""
    client_security: Annotated[ClientSecurity, Secret] = field(default_factory=ClientSecurity)
    """Whom the rank trusts, and how it proves itself."""
    admin_listen: tuple[str, ...] = ()
    """Addresses that serve the same besides ``listen``, for people: "unix:/path"."""
    metrics_listen: str = ""
    """ "host:port" for Prometheus' ``/metrics`` and a kubelet's ``/livez`` and ``/readyz``, over HTTP; empty: none."""
    refusal_proves_death: bool = True
    """Whether a dial that is refused proves that nobody writes at a prefill's address any more; False where a firewall,
    a proxy or a Service may refuse in its place: pages are held then until the prefill, or its next incarnation,
    answers."""
    verify: bool = False
    """Whether a checksum of each page travels with a hand-off and is compared before decode says Success, where both
    sides are set so; memory of the CPU only, and some 1 GB/s of one core on either side."""
    check_pages: bool = False
    """Whether each page that the engine gives is compared with those of its other rooms: one that another room still
    has, held ones too, fails the room PAGES_IN_USE instead of being written or read for both. Finds mistakes of an
    engine or an adapter; on in kvgrpc's own tests and in its demo (docs/session.md, rule 16)."""
    gather_bytes: Annotated[int, least_above_zero(BLOCK_BYTES, unit="bytes")] = 64 << 20
    """Memory of a prefill over TCP in which slices of pages are copied together for decode ranks of a larger tp, 4 MiB
    for each of them and taken when it comes; 0: each slice is a write (docs/topology.md)."""
    tracing: bool = False
    """Whether each hand-off is a span of OpenTelemetry; the engine sets up an SDK with its exporter
    (docs/watch/tracing.md), and without opentelemetry-api there is none."""
    silent_timeout: Annotated[float, least_above_zero(5.0, LONGEST_TIMEOUT_SECONDS, unit="seconds")] = 0.0
    """Seconds after which a peer whose connection stands and that says nothing is given up, with its rooms (its
    interpreter may be held, by a compiler for example); 0: ``timing.idle_timeout``, 60 s. Never longer than a room may
    take."""
    start_timeout: Timeout = 30.0
    """Seconds that opening may take, registration included."""
    resolve_timeout: Timeout = 30.0
    """Seconds that a receiver's registry may take to answer READY."""
    lease_ttl: LeaseSeconds = 10.0
    """Seconds, of an embedded registry."""
    timing: Timing = field(default_factory=Timing)
    """All times of a session."""
    bounds: Bounds = field(default_factory=Bounds)
    """How much a rank keeps of what peers and engines may pile up."""
    max_frame_bytes: FrameBytes = MAX_FRAME_BYTES
    """The largest frame of a session."""
    poll_gives_way: bool = True
    """A poll of an open room lends the interpreter to kvgrpc's threads where they wait for it and the engine lets none
    in by itself between two polls: 50 us at most, once in 200 us, and once after calls that gave them work; with at
    most 1,024 rooms open (docs/performance.md)."""
    switch_interval: Annotated[float, least_above_zero(0.000_01, 1.0, unit="seconds")] = 0.0
    """Seconds after which a thread that computes must hand the interpreter over, for all threads of the process
    (``sys.setswitchinterval``; Python's own is 0.005); 0 leaves it as it is. For engines that compute long between
    polls: 0.0001 takes 15 to 25 % of such a thread."""
    call_limits: CallLimits = field(default_factory=CallLimits)
    """How many calls run at once at this rank's port, of all callers and of one."""
    prefill_tokens_per_second: Annotated[float, bounded(least=0.0, most=1e12, unit="tokens")] = 0.0
    """Tokens of prompts that the engine computes in a second, as you measured it, for plans of pulls until the engine
    says it (``load.say``), which SGLang and vLLM do not; 0: nobody knows (docs/pull.md)."""

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
SECURITY: dict[str, tuple[str, str]] = {
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
    flat = {name: found.pop(name) for name in SECURITY.keys() & found.keys()}
    server = {SECURITY[name][0]: value for name, value in flat.items() if SECURITY[name][0]}
    client = {SECURITY[name][1]: value for name, value in flat.items() if SECURITY[name][1]}
    if "ca_file" not in client:
        client.pop("cert_file", None)
        client.pop("key_file", None)
    if server:
        found.setdefault("server_security", ServerSecurity(**server))
    if client:
        found.setdefault("client_security", ClientSecurity(**client))
    return found


# What only the program that opens the rank can give; of these coordinates may be text.
_OF_THE_ENGINE = frozenset(
    {"pools", "layout", "dp", "pp", "cp", "tp", "engine_rank", "aux", "model", "server_security", "client_security"}
)
_NEVER_TEXT = frozenset({"pools", "layout", "aux", "model", "prefetch", "cache", "server_security", "client_security"})
# What may be set, and what it must be.
KINDS: dict[str, Any] = {
    **{name: kind for name, kind in kinds_of(RankConfig).items() if name not in _NEVER_TEXT},
    **{
        name: kinds_of(ServerSecurity)[of_server] if of_server else kinds_of(ClientSecurity)[of_client]
        for name, (of_server, of_client) in SECURITY.items()
    },
}
