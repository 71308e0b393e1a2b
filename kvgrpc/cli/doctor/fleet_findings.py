"""``kvgrpc doctor --fleet``: can this machine reach every rank of a registry, and do they agree with each other."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvgrpc.cli.doctor.finding import Finding
from kvgrpc.cli.fitting import Name
from kvgrpc.cli.names import row_name, value_name
from kvgrpc.cli.output import counted
from kvgrpc.net import split

if TYPE_CHECKING:
    from kvgrpc.client import SyncClient
    from kvgrpc.client.aio import Client
    from kvgrpc.client.fleet import RankAnswer
    from kvgrpc.v1.server_service_pb2 import GetServerInfoResponse

MOST_SKEW_SECONDS = 5.0
SOON_SECONDS = 14 * 86_400
_COMPARED = ("kvgrpc", "grpcio", "protobuf")
Looked = tuple["GetServerInfoResponse", float, list[str]]


def fleet_findings(client: SyncClient, timeout: float) -> Iterator[Finding]:
    """One finding for each rank, and one for each thing in which they differ. Raises what the registry raises."""

    async def look(rank: Client) -> Looked:
        before = time.time()
        info = await rank.get_server_info()
        skew = info.time.ToNanoseconds() / 1e9 - (before + time.time()) / 2
        tried = await asyncio.gather(*(_is_reached(each, timeout) for each in info.data_plane_endpoints))
        return info, skew, [each for each, reached in zip(info.data_plane_endpoints, tried, strict=True) if not reached]

    answers = client.ask_ranks(look)
    yield Finding(f"registry {client.address}", "ok", f"registered: {counted(len(answers), 'rank')}")
    for answer in answers:
        yield _of_rank(answer)
    yield from _differences([answer.value[0] for answer in answers if answer.value is not None])


def _of_rank(answer: RankAnswer[Looked]) -> Finding:
    rank, address = row_name(answer.row), answer.row.endpoints.grpc
    name = Name(f"{rank} {address}", f"{rank.short} {address}")
    if answer.value is None:
        error = answer.error
        assert error is not None
        return Finding(name, "missing", f"{error.reason.name or error.code}: {error.message}")
    info, skew, unreached = answer.value
    if unreached:
        return Finding(name, "missing", f"its data plane is not reached from here: {', '.join(unreached)}")
    remarks = [
        *(["it drains"] if info.draining else []),
        *([f"its clock is {skew:+.1f} s away from ours: tokens fail"] if abs(skew) > MOST_SKEW_SECONDS else []),
        *_of_certificate(info),
        *_of_registration(info),
    ]
    return Finding(name, "note" if remarks else "ok", "; ".join(remarks) or f"version {info.version}")


def _of_certificate(info: GetServerInfoResponse) -> Iterator[str]:
    if info.security.HasField("certificate_end_time"):
        left = info.security.certificate_end_time.ToSeconds() - info.time.ToSeconds()
        if left < SOON_SECONDS:
            yield f"its certificate ends in {left / 86_400:.1f} days"


def _of_registration(info: GetServerInfoResponse) -> Iterator[str]:
    from kvgrpc.v1 import server_service_pb2 as pb  # of protobuf, which `kvgrpc --help` does without

    if info.HasField("registration") and info.registration.state != pb.REGISTRATION_STATE_REGISTERED:
        yield f"its registration is {value_name(pb.RegistrationState, info.registration.state).lower()}"


def _differences(infos: Sequence[GetServerInfoResponse]) -> Iterable[Finding]:
    for name in _COMPARED:
        found = Counter(info.version if name == "kvgrpc" else info.versions.get(name, "") for info in infos)
        if len(found) > 1:
            said = ", ".join(
                f"{version or 'unknown'} ({counted(count, 'rank')})" for version, count in found.most_common()
            )
            yield Finding(f"versions of {name}", "note", said)


async def _is_reached(endpoint: str, timeout: float) -> bool:
    from kvgrpc.rpc.within import within

    host, port = split(endpoint)
    try:
        _, writer = await within(timeout, asyncio.open_connection(host.strip("[]"), int(port)))
    except (OSError, ValueError, asyncio.TimeoutError):
        return False
    writer.close()
    return True
