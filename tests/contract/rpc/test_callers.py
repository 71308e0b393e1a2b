"""Who calls: limits of one caller beside those of all, and for which ranks a token or a certificate may speak."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.errors import CredentialsInvalid, IdentityMismatch, InvalidRequest, KvGrpcError, TooManyRequests
from kvgrpc.model import RankId, RankRef, Role, new_epoch
from kvgrpc.rpc.callers import CALLER, Caller, check_speaker
from kvgrpc.rpc.credentials.secrets import parse_tokens
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.interceptors import Admission, CallLimits
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server.port.listener import Listener
from kvgrpc.v1 import common_pb2, registry_service_pb2
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.support.registry_serving import Served
from tests.support.secrets import proof, secret, tokens_of
from tests.support.serving import failure
from tests.support.waiting import until

TOKENS = """
rank:any
rank prefill-*:engines
rank prefill-* role=prefill:prefills
rank d-7 role=decode:one
consumer router-a:a
consumer router-b:b
"""


def ref(engine: str, epoch: int | None = None) -> RankRef:
    return RankRef(RankId(engine), new_epoch() if epoch is None else epoch)


class TestLimitsOfOneCaller:
    async def watch(self, channel: Any) -> Any:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        await call.read()
        return call

    async def test_one_that_watches_too_much_locks_nobody_else_out(self) -> None:
        listener = Listener({}, Admission(CallLimits(health_watches_per_caller=2)))
        (address,) = await listener.start(lambda server: [], ["127.0.0.1:0"], ServerSecurity(tokens=tokens_of(TOKENS)))
        async with open_channel(address, proof("a")) as greedy:
            watches = [await self.watch(greedy), await self.watch(greedy)]
            error = await failure(self.watch(greedy))
            assert isinstance(error, TooManyRequests)
            assert error.metadata == {"limit": "2", "value": "3", "scope": "Watch of one caller"}
            assert "consumer router-a" in error.message and error.retry_after
            async with open_channel(address, proof("b")) as other:
                watches.append(await self.watch(other))
            watches[0].cancel()
            deadline = time.monotonic() + 20
            while isinstance(await self.outcome(greedy), TooManyRequests):
                assert time.monotonic() < deadline, "its place is not free again"
            for watch in watches:
                watch.cancel()
        await listener.stop(0.0)

    async def outcome(self, channel: Any) -> KvGrpcError | None:
        try:
            (await self.watch(channel)).cancel()
        except grpc.aio.AioRpcError as error:
            from kvgrpc.rpc.status import error_from

            return error_from(error)
        return None

    async def test_one_that_waits_for_engines_all_the_time_leaves_as_many_waits_to_others(self) -> None:
        tokens = tokens_of("rank d-*:greedy\nrank e-*:honest")
        served = await Served(max_waiters=8, security=ServerSecurity(tokens=tokens)).start()
        request = registry_service_pb2.ResolveRanksRequest(engine="P", role=common_pb2.ROLE_PREFILL, wait_ready=True)
        async with (
            open_channel(served.address, proof("greedy")) as greedy,
            open_channel(served.address, proof("honest")) as honest,
        ):
            waiting = [RegistryServiceStub(greedy).ResolveRanks(request, timeout=30) for _ in range(4)]
            await until(lambda: served.waiting == 4)
            error = await failure(RegistryServiceStub(greedy).ResolveRanks(request, timeout=30))
            assert isinstance(error, TooManyRequests) and error.retry_after
            assert error.metadata == {
                "limit": "4",
                "value": "5",
                "scope": "waiting ResolveRanks calls of one caller",
            }
            assert "rank d-*" in error.message
            waiting.append(RegistryServiceStub(honest).ResolveRanks(request, timeout=30))
            await until(lambda: served.waiting == 5)
            for call in waiting:
                call.cancel()
        await served.stop()

    def test_callers_without_a_name_are_told_apart_by_their_hosts(self) -> None:
        unnamed, named = tokens_of("consumer:x\nconsumer router:y")
        assert Caller.with_token(unnamed, "10.0.0.7").name == "10.0.0.7"
        assert Caller.with_token(named, "10.0.0.7").name == "consumer router"


class TestWhoMaySpeakForARank:
    @pytest.mark.parametrize(
        ("name", "engine", "role", "may"),
        [
            ("any", "whoever", Role.DECODE, True),
            ("engines", "prefill-3", Role.DECODE, True),
            ("engines", "other", Role.PREFILL, False),
            ("prefills", "prefill-3", Role.PREFILL, True),
            ("prefills", "prefill-3", Role.DECODE, False),
            ("prefills", "decode-3", Role.PREFILL, False),
            ("one", "d-7", Role.DECODE, True),
            ("one", "d-77", Role.DECODE, False),
        ],
    )
    async def test_rows_are_held_to_the_scope_of_the_token(
        self, name: str, engine: str, role: Role, may: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        served = await Served(security=ServerSecurity(tokens=tokens_of(TOKENS))).start()
        row = registry_service_pb2.RankRow(
            rank=common_pb2.RankRef(rank=common_pb2.RankId(engine=engine), epoch=new_epoch()),
            role=common_pb2.Role.ValueType(role),
            layout=common_pb2.Layout(dp=1, pp=1, cp=1, tp=1),
            endpoints=registry_service_pb2.Endpoints(grpc="127.0.0.1:9"),
            data_plane="shm",
        )
        request = registry_service_pb2.RegisterRequest(rows=[row])
        async with open_channel(served.address, proof(name)) as channel:
            call = RegistryServiceStub(channel).Register(request, timeout=5)
            if may:
                await call
            else:
                error = await failure(call)
                assert isinstance(error, IdentityMismatch)
                assert set(error.metadata) == {"rank", "caller", "scope"}
                assert secret(name) not in str(error.metadata) + error.message
                path = "/kvgrpc.v1.RegistryService/Register"
                assert f"127.0.0.1 ({error.metadata['caller']}) was refused {path}: {error}" in caplog.messages
        await served.stop()

    @pytest.mark.parametrize(
        ("name", "may"), [("any", True), ("engines", True), ("prefills", True), ("one", False), ("decodes", False)]
    )
    async def test_nobody_takes_another_ranks_row_away(self, name: str, may: bool) -> None:
        tokens = tokens_of(f"{TOKENS}\nrank prefill-* role=decode:decodes")
        served = await Served(security=ServerSecurity(tokens=tokens)).start()
        rank = common_pb2.RankRef(rank=common_pb2.RankId(engine="prefill-3"), epoch=new_epoch())
        row = registry_service_pb2.RankRow(
            rank=rank,
            role=common_pb2.ROLE_PREFILL,
            layout=common_pb2.Layout(dp=1, pp=1, cp=1, tp=1),
            endpoints=registry_service_pb2.Endpoints(grpc="127.0.0.1:9"),
            data_plane="shm",
        )
        async with open_channel(served.address, proof("any")) as channel:
            await RegistryServiceStub(channel).Register(registry_service_pb2.RegisterRequest(rows=[row]), timeout=5)
        async with open_channel(served.address, proof(name)) as channel:
            request = registry_service_pb2.DeregisterRequest(ranks=[rank])
            call = RegistryServiceStub(channel).Deregister(request, timeout=5)
            if may:
                assert (await call).removed == 1
            else:
                error = await failure(call)
                assert isinstance(error, IdentityMismatch) and "ranks[0]" in error.message
        await served.stop()

    @pytest.mark.parametrize(
        ("names", "engine", "role", "may"),
        [
            (["P-1.prefill.rank"], "P-1", Role.PREFILL, True),
            (["P-1.prefill.rank"], "P-1", Role.DECODE, False),
            (["P-1.prefill.rank"], "P-2", Role.PREFILL, False),
            (["a.b.decode.rank"], "a.b", Role.DECODE, True),
            (["spiffe://cluster/ns/P-1/prefill/rank"], "P-1", Role.PREFILL, True),
            (["node-7", "prefill-7.rank"], "whoever", Role.DECODE, True),
            (["*.prefill.rank"], "P-1", Role.PREFILL, False),
        ],
    )
    def test_so_is_the_name_of_a_certificate(self, names: list[str], engine: str, role: Role, may: bool) -> None:
        known = Caller.with_certificate(names)
        assert known is not None
        token = CALLER.set(known)
        try:
            if may:
                check_speaker(ref(engine), role, "hello.member")
            else:
                with pytest.raises(IdentityMismatch, match=r"hello\.member"):
                    check_speaker(ref(engine), role, "hello.member")
        finally:
            CALLER.reset(token)

    def test_an_epoch_far_ahead_would_fence_every_later_one_and_is_refused(self) -> None:
        check_speaker(ref("P", round((time.time() + 500) * 1e6)), Role.PREFILL, "rows[0].rank")
        with pytest.raises(InvalidRequest) as refused:
            check_speaker(ref("P", 2**53 - 1), Role.PREFILL, "rows[0].rank")
        assert refused.value.metadata["field"] == "rows[0].rank.epoch"

    @pytest.mark.parametrize(
        "line", ["rank a b:x", "rank role=both:x", "consumer role=prefill:x", "rank a;b:x", "rank prefill-*", "root:x"]
    )
    def test_a_line_that_means_nothing_is_refused_without_showing_it(self, line: str, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest) as refused:
            parse_tokens(f"# tokens\n{line}")
        assert refused.value.metadata["value"] == "'line 2'"

    async def test_a_token_of_nobody_is_still_nobody(self) -> None:
        listener = Listener()
        tokens = tokens_of(TOKENS)
        (address,) = await listener.start(lambda server: [], ["127.0.0.1:0"], ServerSecurity(tokens=tokens))
        async with open_channel(address, proof("prefill-*")) as channel:
            watch: Any = health_pb2_grpc.HealthStub(channel)
            error = await failure(watch.Watch(health_pb2.HealthCheckRequest(), timeout=5).read())
            assert isinstance(error, CredentialsInvalid)
        await listener.stop(0.0)
