"""The largest requests that each method takes, by its path; and what is said on a stream of each that has one."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvgrpc.events.following.questions import MAX_ANSWERS, MAX_ENGINES, MAX_PLAN_PROMPTS, MAX_PROMPTS
from kvgrpc.model import Layout, Pool, PoolKind, RankId, RankRef, Region, new_epoch
from kvgrpc.paging import MAX_PAGE
from kvgrpc.prefetch.servicer import MAX_WATCHED
from kvgrpc.registry.wire import MAX_LEASES_PER_REQUEST, MAX_ROWS_PER_REQUEST, MAX_SELECTORS
from kvgrpc.rpc.interceptors import ALLOWED
from kvgrpc.transfer.servicer import MAX_LOCATED_ROOMS
from kvgrpc.v1 import common_pb2, server_service_pb2
from kvgrpc.v1 import event_service_pb2 as events_pb
from kvgrpc.v1 import index_service_pb2 as index_pb
from kvgrpc.v1 import prefetch_service_pb2 as prefetch_pb
from kvgrpc.v1 import pull_service_pb2 as pull_pb
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.wire import layout_to_pb, pool_to_pb, rank_ref_to_pb
from tests.support.rank_host import AUX_BYTES, LAYERS, PAGE_BYTES, PAGES

REGISTRY, TRANSFER, EVENTS, INDEX, CACHE, PULL, SERVER = (
    f"/kvgrpc.v1.{name}Service/" for name in ("Registry", "Transfer", "Event", "Index", "Prefetch", "Pull", "Server")
)
HEALTH_CHECK, HEALTH_WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
# They end the process, and take that back, for whoever may call them.
NOT_CALLED = {SERVER + "Drain", SERVER + "Undrain"}
HASHES, TOKENS = 65_536, 1 << 20
FRAME_ROOMS = 60_000
# The honest pair has rooms of small numbers, and an operator may cancel those.
_OF_NOBODY = 2**62 + 7


def largest(caller: str, identity: pull_pb.PageIdentity) -> dict[str, list[Message]]:
    """By path, of methods with one request; each has several, so that nothing known of the last one helps."""
    gone = [rank(f"{caller}-gone", tp=n) for n in range(MAX_ROWS_PER_REQUEST)]
    ranks = [registry_pb.RankSelector(tp=n) for n in range(MAX_SELECTORS)]
    engines = [f"{caller}-{kind}" for kind in ("rows", "regions")]
    rooms = [pb.RoomKey(room=room) for room in random.sample(range(1, 2**50), MAX_LOCATED_ROOMS)]
    other = prefetch_pb.CacheNamespace(model="other")
    found: dict[str, list[Any]] = {
        REGISTRY + "Register": [*(regions(caller, n) for n in range(3)), rows(caller)],
        REGISTRY + "Deregister": [registry_pb.DeregisterRequest(ranks=gone)],
        REGISTRY + "GetEngine": [registry_pb.GetEngineRequest(engine=each, page_size=MAX_PAGE) for each in engines],
        REGISTRY + "ListEngines": [
            registry_pb.ListEnginesRequest(page_size=MAX_PAGE, include_rows=included) for included in (True, False)
        ],
        REGISTRY + "ResolveRanks": [registry_pb.ResolveRanksRequest(engine=each, selectors=ranks) for each in engines],
        REGISTRY + "WatchEngines": [registry_pb.WatchEnginesRequest()],
        TRANSFER + "ListSessions": [pb.ListSessionsRequest(page_size=MAX_PAGE)],
        TRANSFER + "ListRooms": [
            pb.ListRoomsRequest(page_size=MAX_PAGE, held_only=held, newest_failed=failed)
            for held, failed in ((False, False), (True, False), (False, True))
        ],
        TRANSFER + "GetRoom": [pb.GetRoomRequest(room=_OF_NOBODY)],
        TRANSFER + "LocateRooms": [pb.LocateRoomsRequest(rooms=rooms)],
        TRANSFER + "CancelRoom": [pb.CancelRoomRequest(room=_OF_NOBODY, cause="x" * 256)],
        TRANSFER + "GetRank": [pb.GetRankRequest()],
        TRANSFER + "GetTopology": [pb.GetTopologyRequest(prefill=shape(cp=64, tp=64), decode=shape(cp=1, tp=64))],
        EVENTS + "ListStreams": [events_pb.ListStreamsRequest(page_size=MAX_PAGE)],
        EVENTS + "Watch": [
            events_pb.WatchRequest(mode=mode, encoding=encoding)
            for mode in (events_pb.WATCH_MODE_REPLAY, events_pb.WATCH_MODE_SNAPSHOT)
            for encoding in (events_pb.WATCH_ENCODING_RAW, events_pb.WATCH_ENCODING_TYPED)
        ],
        INDEX + "Score": scores(),
        INDEX + "Plan": plans(),
        INDEX + "ListSources": [index_pb.ListSourcesRequest(page_size=MAX_PAGE)],
        CACHE + "Lookup": [prefetch_pb.LookupRequest(pages=pages) for pages in prompts()],
        CACHE + "StartPrefetch": [
            prefetch_pb.StartPrefetchRequest(request_id=f"{caller} {n}", pages=each) for n, each in enumerate(prompts())
        ],
        CACHE + "WatchOperations": [
            prefetch_pb.WatchOperationsRequest(),
            prefetch_pb.WatchOperationsRequest(operation_ids=["x" * 60] * MAX_WATCHED),
        ],
        CACHE + "TerminatePrefetch": [prefetch_pb.TerminatePrefetchRequest(operation_id="x" * 128)],
        CACHE + "StartBackup": [
            prefetch_pb.StartBackupRequest(request_id=f"{caller} {n}", pages=each) for n, each in enumerate(prompts())
        ],
        CACHE + "ListOperations": [prefetch_pb.ListOperationsRequest(page_size=MAX_PAGE)],
        CACHE + "GetCacheInfo": [prefetch_pb.GetCacheInfoRequest()],
        CACHE + "PurgePages": [prefetch_pb.PurgePagesRequest(cache_namespace=other, tiers=[common_pb2.TIER_HOST])],
        CACHE + "PinPages": [prefetch_pb.PinPagesRequest(pages=pages) for pages in prompts()],
        PULL + "CountPages": [pull_pb.CountPagesRequest(identity=identity, page_hashes=hashes())],
        PULL + "LendPages": [
            pull_pb.LendPagesRequest(identity=identity, page_hashes=hashes(), room=n + 1, taker=rank(f"{caller}-taker"))
            for n in range(3)
        ],
        PULL + "ListPulls": [pull_pb.ListPullsRequest()],
        SERVER + "GetServerInfo": [server_service_pb2.GetServerInfoRequest()],
        SERVER + "ListCallers": [server_service_pb2.ListCallersRequest(page_size=MAX_PAGE)],
        HEALTH_CHECK: [health_pb2.HealthCheckRequest()],
        HEALTH_WATCH: [health_pb2.HealthCheckRequest()],
    }
    assert set(ALLOWED) - NOT_CALLED - set(said(caller, None)) < set(found)
    return found


def said(caller: str, to: common_pb2.RankRef | None) -> dict[str, Callable[[int], Iterator[Message]]]:
    """By path, of methods whose requests are a stream: what is said on the n-th stream, an answer between each two.

    ``to``: the rank that is called.
    """
    member = new_epoch()

    def session(stream: int) -> Iterator[Message]:
        """A Hello as large as one may be, then the two largest frames. Each is of a decode rank of its own."""
        pool = Pool("kv", PoolKind.KV, 16, PAGES, "float32", tuple(
            Region(layer, "kv", 1 << 20 | layer * PAGES * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES) for layer in range(LAYERS)
        ))  # fmt: skip
        hello = pb.Hello(
            opener=rank_ref_to_pb(RankRef(RankId(f"{caller}-{stream}"), new_epoch())),
            to=to,
            stream=1,
            layout=layout_to_pb(Layout()),
            pools=[pool_to_pb(pool)],
            aux_item_bytes=[AUX_BYTES],
            data_plane="shm",
            data_plane_address=b"{}",
            expected=pb.CachePart(layer_start=0, layer_count=LAYERS, aux=True),
        )
        if stream % 3 == 0:
            hello.pools.extend(_other_pools())
        yield pb.SessionRequest(hello=hello)
        first = stream * FRAME_ROOMS + 1
        rooms = range(first, first + FRAME_ROOMS)
        if stream % 2:
            yield pb.SessionRequest(rooms=[pb.DecodeRoom(room=room, want=pb.WANT_STOP) for room in rooms])
        yield pb.SessionRequest(forget_rooms=rooms)

    def leases(stream: int) -> Iterator[Message]:
        request = registry_pb.KeepAliveRequest(lease_ids=[secrets.randbits(61) for _ in range(MAX_LEASES_PER_REQUEST)])
        for _ in range(4):
            yield request

    def votes(stream: int) -> Iterator[Message]:
        hello = prefetch_pb.AgreementHello(
            member=common_pb2.RankRef(rank=common_pb2.RankId(engine="a-cache", tp=1), epoch=member),
            layout=common_pb2.Layout(dp=1, pp=1, cp=1, tp=2),
        )
        yield prefetch_pb.JoinAgreementRequest(hello=hello)
        vote = prefetch_pb.AgreementVote(stage=prefetch_pb.AGREEMENT_STAGE_HITS, pages=7)
        request = prefetch_pb.JoinAgreementRequest(votes=[vote] * 4_096)
        for number, each in enumerate(request.votes):
            each.operation_id = f"{stream} {number} ".ljust(128, "x")
        for _ in range(4):
            yield request

    def symbols(stream: int) -> Iterator[Message]:
        for symbol in ("kvgrpc.v1.TransferService", "kvgrpc.v1.PrefetchService", "nothing"):
            yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)

    return {
        TRANSFER + "Session": session,
        REGISTRY + "KeepAlive": leases,
        CACHE + "JoinAgreement": votes,
        REFLECTION: symbols,
    }


def rank(engine: str, tp: int = 0) -> common_pb2.RankRef:
    return common_pb2.RankRef(rank=common_pb2.RankId(engine=engine, tp=tp), epoch=new_epoch())


def regions(caller: str, number: int) -> registry_pb.RegisterRequest:
    """75 rows of 4,000 regions, no two pools alike: 3.7 MiB."""
    request = registry_pb.RegisterRequest()
    for tp in range(75):
        row = _row(request, f"{caller}-regions", tp, 75, number)
        pool = row.pools.add(name="kv", kind=common_pb2.POOL_KIND_KV, page_tokens=1, pages=8)
        pool.location = f"cpu:{caller}.{tp}.{number}"
        for layer in range(4_000):
            pool.regions.add(layer=layer, component="kv", page_stride_bytes=1, page_bytes=1)
    return request


def rows(caller: str) -> registry_pb.RegisterRequest:
    """As many rows as one request takes, of the largest engine that there may be."""
    request = registry_pb.RegisterRequest()
    for tp in range(MAX_ROWS_PER_REQUEST):
        _row(request, f"{caller}-rows", tp, 65_536, 0)
    return request


def prompts() -> list[prefetch_pb.PromptPages]:
    return [
        prefetch_pb.PromptPages(page_hashes=hashes()),
        prefetch_pb.PromptPages(tokens=range(4_096)),
        prefetch_pb.PromptPages(tokens=[n % 100 for n in range(HASHES * 4)]),
    ]


def hashes() -> list[bytes]:
    raw = random.randbytes(32 * HASHES)
    return [raw[start : start + 32] for start in range(0, len(raw), 32)]


def scores() -> list[Message]:
    names = [f"engine-{number}" for number in range(MAX_ENGINES)]
    blocks = index_pb.BlockHashes(values=[secrets.randbits(64) for _ in range(HASHES)])
    few = index_pb.BlockHashes(values=[secrets.randbits(64) for _ in range(HASHES // MAX_PROMPTS)])
    tokens = [n % 100 for n in range(TOKENS)]
    prompts = [
        [index_pb.ScorePrompt(block_hashes=blocks)],
        [index_pb.ScorePrompt(block_hashes=few)] * MAX_PROMPTS,
        # The most that is hashed on the loop, and what threads hash.
        [index_pb.ScorePrompt(vllm=index_pb.VllmPrompt(token_ids=tokens[:16_384], page_tokens=1))] * 3,
        [index_pb.ScorePrompt(sglang=index_pb.SglangPrompt(token_ids=tokens[:16_384], page_tokens=1))] * 3,
        [index_pb.ScorePrompt(vllm=index_pb.VllmPrompt(token_ids=tokens, page_tokens=16))],
    ]
    return [index_pb.ScoreRequest(prompts=each, engines=names, with_freshness=True) for each in prompts]


def plans() -> list[Message]:
    names = [f"engine-{number}" for number in range(MAX_ENGINES)]
    few = index_pb.BlockHashes(values=[secrets.randbits(64) for _ in range(HASHES // MAX_PLAN_PROMPTS)])
    prompt = index_pb.ScorePrompt(block_hashes=few)
    most = MAX_ANSWERS // MAX_PLAN_PROMPTS
    everywhere = index_pb.PlanPrompt(prompt=prompt)
    somewhere = index_pb.PlanPrompt(prompt=prompt, engines=names, sources=names)
    return [
        index_pb.PlanRequest(prompts=[everywhere] * MAX_PLAN_PROMPTS, max_placements=most, reserve=True),
        index_pb.PlanRequest(prompts=[somewhere] * 64, max_placements=most, reserve=True),
    ]


def shape(*, cp: int, tp: int) -> pb.EngineShape:
    return pb.EngineShape(layout=common_pb2.Layout(dp=1, pp=1, cp=cp, tp=tp), heads=64, layers=64, page_tokens=64)


def _row(request: registry_pb.RegisterRequest, engine: str, tp: int, ranks: int, number: int) -> Any:
    return request.rows.add(
        rank=common_pb2.RankRef(rank=common_pb2.RankId(engine=engine, tp=tp), epoch=number + 1),
        role=common_pb2.ROLE_DECODE,
        layout=common_pb2.Layout(dp=1, pp=1, cp=1, tp=ranks),
        endpoints=registry_pb.Endpoints(grpc="127.0.0.1:9"),
        data_plane="shm",
    )


def _other_pools() -> Iterator[common_pb2.PagePool]:
    """As many regions as a Hello may have besides those that fit; the session is refused for them."""
    for number in range(63):
        pool = common_pb2.PagePool(name=f"pool-{number}", kind=common_pb2.POOL_KIND_KV, page_tokens=1, pages=8)
        for layer in range(64):
            pool.regions.add(
                layer=layer, component="kv", address=(number * 64 + layer + 1) << 30, page_stride_bytes=8, page_bytes=8
            )
        yield pool
