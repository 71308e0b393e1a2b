"""Mooncake over TCP between real processes: contents, refusals, hangs, death, and who is connected."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from kvgrpc.dataplane.base import MemoryRange, Outcome, Transfer
from kvgrpc.dataplane.mooncake.connections import Connection, arriving, read_table, unheld
from kvgrpc.dataplane.mooncake.plane import MooncakeDataPlane
from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.server import RankConfig, open_rank
from tests.support.dataplane_process import PlaneProcess, digest, noise, u64, view
from tests.support.faults.dataplane import wait
from tests.support.waiting import wait_until

MIB = 1 << 20
NBYTES = 64 * MIB


class Writer:
    """The plane of this process, with a registered block full of noise."""

    def __init__(self) -> None:
        self.plane = MooncakeDataPlane("127.0.0.1", "tcp")
        self.block = self.plane.allocate(NBYTES)
        self.plane.register([MemoryRange(self.block, NBYTES)])
        self.memory = view(self.block, NBYTES)
        self.memory[:] = noise(NBYTES, 1)

    def write(self, peer: PlaneProcess, nbytes: int = 4096, offset: int = 0, attached: object = None) -> Transfer:
        attached = attached or self.plane.attach(peer.address)
        return self.plane.submit(attached, *u64(self.block + offset, peer.block + offset, nbytes))


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    try:
        writer = Writer()
    except FeatureDisabled as missing:
        pytest.skip(str(missing))
    yield writer
    assert writer.plane.close(15.0)


@pytest.fixture(scope="module")
def lasting(writer: Writer) -> Iterator[PlaneProcess]:
    """A peer for tests that leave it as they found it."""
    with PlaneProcess("mooncake", NBYTES) as process:
        yield process


@pytest.fixture
def mortal(writer: Writer) -> Iterator[PlaneProcess]:
    with PlaneProcess("mooncake", NBYTES) as process:
        yield process


def test_contents_arrive_whole_and_fragmented(writer: Writer, lasting: PlaneProcess) -> None:
    result = wait(writer.write(lasting, NBYTES))
    assert (result.outcome, result.nbytes) == (Outcome.DONE, NBYTES)
    assert lasting.digest(0, NBYTES) == digest(writer.memory)

    order = np.random.default_rng(2).permutation(10_000).astype(np.uint64)
    offsets = np.arange(10_000, dtype=np.uint64) * np.uint64(4096)
    columns = offsets + np.uint64(writer.block), order * np.uint64(4096) + np.uint64(lasting.block)
    attached = writer.plane.attach(lasting.address)
    result = wait(writer.plane.submit(attached, *columns, np.full(10_000, 4096, dtype=np.uint64)), 20.0)
    assert result.outcome is Outcome.DONE, result
    expected = np.empty((10_000, 4096), dtype=np.uint8)
    expected[order] = writer.memory[: 10_000 * 4096].reshape(10_000, 4096)
    assert lasting.digest(0, 10_000 * 4096) == digest(expected)


def test_what_is_on_its_way_to_a_peer_is_counted_and_bounded(writer: Writer, lasting: PlaneProcess) -> None:
    plane: Any = writer.plane
    attached = plane.attach(lasting.address)
    assert wait(writer.write(lasting, attached=attached)).outcome is Outcome.DONE
    offsets = np.arange(5_000, dtype=np.uint64) * np.uint64(4096)
    columns = offsets + np.uint64(writer.block), offsets + np.uint64(lasting.block)
    transfer = plane.submit(attached, *columns, np.full(5_000, 4096, dtype=np.uint64))
    writes, nbytes = plane.limits_of_a_peer
    seen, deadline = set(), time.monotonic() + 20
    while transfer.poll() is None:
        seen.add(plane.in_flight())
        assert time.monotonic() < deadline
    assert 0 < max(count for count, _ in seen) <= writes and 0 < max(size for _, size in seen) <= nbytes
    assert plane.in_flight() == (0, 0)


def test_wrong_ranges_are_rejected_and_disturb_nobody(writer: Writer, lasting: PlaneProcess) -> None:
    attached = writer.plane.attach(lasting.address)
    assert wait(writer.write(lasting, attached=attached)).outcome is Outcome.DONE
    before = lasting.digest(0, NBYTES)
    for source, destination in [(writer.block, lasting.block + NBYTES), (writer.block, 16), (16, lasting.block)] * 4:
        columns = u64([writer.block, source], [lasting.block, destination], [4096, 4096])
        result = wait(writer.plane.submit(attached, *columns))
        assert (result.outcome, result.nbytes) == (Outcome.REJECTED, 0)
        assert "descriptor 1" in result.detail
    ports = frozenset(msgspec.json.decode(lasting.address)["data_ports"])
    connected = {(each.local, each.remote) for each in arriving(read_table(ports), ports, None)}
    assert wait(writer.write(lasting, attached=attached)).outcome is Outcome.DONE
    assert connected <= {(each.local, each.remote) for each in arriving(read_table(ports), ports, None)}
    assert lasting.digest(0, NBYTES) == before


def test_a_stopped_submission_ends_soon_and_certain(writer: Writer, lasting: PlaneProcess) -> None:
    count = 50_000
    columns = u64(np.full(count, writer.block), np.full(count, lasting.block), np.full(count, 4096))
    transfer = writer.plane.submit(writer.plane.attach(lasting.address), *columns)
    wait_until(lambda: transfer.poll() is not None or len(transfer._handles) > 0)  # type: ignore[attr-defined]
    transfer.stop()
    result = wait(transfer)
    assert result.outcome is Outcome.REJECTED
    assert result.nbytes < count * 4096 / 2


def test_a_new_process_on_the_port_of_an_old_one_is_not_taken_for_it(writer: Writer, lasting: PlaneProcess) -> None:
    """The engine would go on writing to the data port of the old one; under a new name it asks again."""
    assert wait(writer.write(lasting)).outcome is Outcome.DONE
    successor = msgspec.json.encode({**msgspec.json.decode(lasting.address), "incarnation": "another"})
    attached: Any = writer.plane.attach(successor)
    host, port = msgspec.json.decode(lasting.address)["session"].split(":")
    assert attached.queue.session == f"{host}:0{port}"
    again: Any = writer.plane.attach(successor)
    assert again.queue is attached.queue
    assert wait(writer.write(lasting, MIB, MIB, attached)).outcome is Outcome.DONE
    assert lasting.digest(MIB, MIB) == digest(writer.memory[MIB : 2 * MIB])


def test_two_peers_at_once(writer: Writer, lasting: PlaneProcess, mortal: PlaneProcess) -> None:
    half = NBYTES // 2
    running = [writer.write(peer, half, half) for peer in (lasting, mortal)]
    assert {wait(transfer).outcome for transfer in running} == {Outcome.DONE}
    assert lasting.digest(half, half) == mortal.digest(half, half) == digest(writer.memory[half:])


def test_a_peer_that_is_stopped_for_a_second_receives_everything(writer: Writer, mortal: PlaneProcess) -> None:
    assert wait(writer.write(mortal)).outcome is Outcome.DONE
    mortal.signal(signal.SIGSTOP)
    transfer = writer.write(mortal, NBYTES)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert transfer.poll() is None
        time.sleep(0.005)
    mortal.signal(signal.SIGCONT)
    assert wait(transfer).outcome is Outcome.DONE
    assert mortal.digest(0, NBYTES) == digest(writer.memory)


def test_a_peer_that_hangs_at_first_contact_stalls_nobody(
    writer: Writer, lasting: PlaneProcess, mortal: PlaneProcess
) -> None:
    mortal.signal(signal.SIGSTOP)  # for as long as the others write
    hangs = writer.write(mortal)
    for _ in range(20):
        assert wait(writer.write(lasting)).outcome is Outcome.DONE
        assert hangs.poll() is None
    mortal.signal(signal.SIGCONT)
    assert wait(hangs).outcome is Outcome.DONE


def test_a_peer_that_hangs_with_megabytes_on_their_way_to_it_stalls_nobody(
    writer: Writer, lasting: PlaneProcess, mortal: PlaneProcess
) -> None:
    """Both were contacted before; the engine would wait ten seconds for progress at the one that hangs."""
    plane: Any = writer.plane
    healthy, stopped = plane.attach(lasting.address), plane.attach(mortal.address)
    assert wait(writer.write(lasting, attached=healthy)).outcome is Outcome.DONE
    assert wait(writer.write(mortal, attached=stopped)).outcome is Outcome.DONE
    mortal.signal(signal.SIGSTOP)  # for as long as the others write
    hangs = writer.write(mortal, NBYTES, attached=stopped)
    wait_until(lambda: hangs.poll() is None and plane.in_flight()[1] >= MIB)
    began = time.monotonic()
    for number in range(20):
        assert wait(writer.write(lasting, MIB, number * MIB, healthy)).outcome is Outcome.DONE
        assert hangs.poll() is None
    took = time.monotonic() - began
    print(f"20 writes of 1 MiB beside {plane.in_flight()[1] / MIB:.0f} MiB that hang: {took:.2f} s")
    assert took < 5.0, "an idle machine takes 0.1 s"
    mortal.signal(signal.SIGCONT)
    assert wait(hangs, 20.0).outcome is Outcome.DONE
    assert lasting.digest(0, 20 * MIB) == digest(writer.memory[: 20 * MIB])
    assert mortal.digest(0, NBYTES) == digest(writer.memory)


@pytest.mark.parametrize("nbytes", [4096, MIB], ids=["small", "large"])
def test_a_peer_killed_during_a_write_is_known_soon(writer: Writer, mortal: PlaneProcess, nbytes: int) -> None:
    attached = writer.plane.attach(mortal.address)
    assert wait(writer.write(mortal, attached=attached)).outcome is Outcome.DONE
    mortal.signal(signal.SIGSTOP)  # so that much is on its way when it dies
    count = NBYTES // nbytes
    offsets = np.arange(count) * nbytes
    columns = u64(writer.block + offsets, mortal.block + offsets, np.full(count, nbytes))
    transfer = writer.plane.submit(attached, *columns)
    for _ in range(20):
        assert transfer.poll() is None
        time.sleep(0.002)  # the write is under way all the while
    mortal.kill()
    # An idle machine takes two seconds at most; without the reset it would be the ten that no progress may take.
    result = wait(transfer, 8.0)
    assert result.outcome is Outcome.FAILED_SRC_FREE
    assert wait(writer.write(mortal, attached=attached), 8.0).outcome in (Outcome.FAILED_SRC_FREE, Outcome.REJECTED)


def test_a_peer_that_is_gone_was_sent_nothing(writer: Writer, mortal: PlaneProcess) -> None:
    mortal.kill()
    result = wait(writer.write(mortal))
    assert result.outcome is Outcome.REJECTED
    assert "does not answer" in result.detail


@pytest.mark.parametrize("nonsense", [b"", b"{}", b"\xff", b'{"plane":"shm"}', b'{"plane":"mooncake"}'])
def test_nonsense_is_no_address(writer: Writer, nonsense: bytes) -> None:
    with pytest.raises(ValueError, match="not an address"):
        writer.plane.attach(nonsense)


def test_an_address_with_a_strange_session_or_transport_is_refused(writer: Writer, lasting: PlaneProcess) -> None:
    decoded = msgspec.json.decode(lasting.address)
    with pytest.raises(ValueError, match="session"):
        writer.plane.attach(msgspec.json.encode({**decoded, "session": "redis://x"}))
    with pytest.raises(ValueError, match="over rdma"):
        writer.plane.attach(msgspec.json.encode({**decoded, "transport": "rdma"}))


def test_connections_of_the_living_do_not_linger(writer: Writer, lasting: PlaneProcess) -> None:
    assert wait(writer.write(lasting)).outcome is Outcome.DONE
    ports = frozenset(msgspec.json.decode(lasting.address)["data_ports"])
    assert arriving(read_table(ports), ports, None), "we are connected"
    for address in (writer.plane.address().decode(), "", "nonsense"):
        assert lasting.ask("connections", address=address) == []


def test_what_a_killed_writer_sent_counts_until_it_was_read(writer: Writer, mortal: PlaneProcess) -> None:
    """Its bytes sit in the sockets of a receiver that is stopped."""
    ports = frozenset(msgspec.json.decode(mortal.address)["data_ports"])
    with PlaneProcess("mooncake", NBYTES) as killed:
        assert killed.ask("write", address=mortal.address.decode(), block=mortal.block, seed=2)[0] == "DONE"
        mortal.signal(signal.SIGSTOP)
        killed.tell("write", address=mortal.address.decode(), block=mortal.block, seed=3)
        wait_until(lambda: any(each.unread for each in arriving(read_table(ports), ports, None)))
        assert not unheld(read_table(ports), read_table(ports), False, ports, None), "in use"
        killed.kill()
        left = unheld(read_table(ports), read_table(ports), False, ports, None)
        assert any(each.unread for each in left), "sent, not read, sender dead"
        mortal.signal(signal.SIGCONT)
        wait_until(lambda: mortal.ask("connections", address=killed.address.decode()) == [])
        assert not arriving(read_table(ports), ports, None)


def test_a_failed_write_is_reported_when_its_bytes_have_left_this_host(mortal: PlaneProcess) -> None:
    """The engine has given up and closed its connections; megabytes of the write still wait in the kernel."""
    ports = frozenset(msgspec.json.decode(mortal.address)["data_ports"])

    def unsent() -> list[Connection]:
        return [each for each in read_table(ports) if each.remote[1] in ports and each.inode == 0 and each.sends]

    with PlaneProcess("mooncake", 32 * MIB, MC_TCP_PROGRESS_TIMEOUT_SEC="1") as impatient:
        assert impatient.ask("write", address=mortal.address.decode(), block=mortal.block, seed=2)[0] == "DONE"
        mortal.signal(signal.SIGSTOP)
        impatient.tell("write", address=mortal.address.decode(), block=mortal.block, seed=3)
        wait_until(lambda: len(unsent()) == 4)
        assert sum(each.unsent for each in unsent()) > MIB
        time.sleep(0.3)  # in which it must not answer
        assert not impatient.has_answered()
        mortal.signal(signal.SIGCONT)
        assert impatient.answer() == ["FAILED_SRC_FREE", 0]
        assert not unsent()


def test_a_rank_names_the_device_that_is_not_there(writer: Writer) -> None:
    pool = Pool("kv", PoolKind.KV, 16, 8, "float32", (Region(0, "kv", writer.block, 4096, 4096),))
    with pytest.raises(InvalidRequest) as refused:
        open_rank(RankConfig(engine="P", role=Role.PREFILL, pools=(pool,), data_plane="mooncake", device="mlx5_99"))
    metadata = refused.value.metadata
    assert (metadata["field"], metadata["value"]) == ("device", "mlx5_99")
    assert "no adapter mlx5_99 here" in metadata["rule"]


def test_an_engine_of_somebody_else_is_used_and_left_alone(lasting: PlaneProcess) -> None:
    owner = Writer()
    plane = MooncakeDataPlane.of(owner.plane._engine, "127.0.0.1")
    assert plane.session == owner.plane.session
    plane.register([MemoryRange(owner.block, NBYTES)])
    attached = plane.attach(lasting.address)
    assert wait(plane.submit(attached, *u64(owner.block, lasting.block, MIB))).outcome is Outcome.DONE
    assert lasting.digest(0, MIB) == digest(owner.memory[:MIB])
    plane.close(1.0)
    assert wait(plane.submit(attached, *u64(owner.block, lasting.block, MIB))).outcome is Outcome.REJECTED
    assert wait(owner.write(lasting)).outcome is Outcome.DONE
    back = lasting.ask("write", address=owner.plane.address().decode(), block=owner.block, seed=5)
    assert back == ["DONE", NBYTES], "what the owner registered stays registered"
    assert owner.plane.close(15.0)


def test_closing_with_writes_in_flight_leaves_none(mortal: PlaneProcess) -> None:
    closing = Writer()
    transfer = closing.write(mortal, NBYTES)
    wait_until(lambda: transfer.poll() is not None or len(transfer._handles) > 0)  # type: ignore[attr-defined]
    assert closing.plane.close(15.0)
    assert wait(transfer).outcome in (Outcome.REJECTED, Outcome.DONE), "what ran was waited for"
    assert wait(closing.write(mortal, attached=object())).outcome is Outcome.REJECTED
    with pytest.raises(ValueError, match="closed"):
        closing.plane.attach(mortal.address)
    ports = frozenset(msgspec.json.decode(mortal.address)["data_ports"])
    wait_until(lambda: not arriving(read_table(ports), ports, None))


def test_a_forked_child_is_refused_and_ends(writer: Writer, lasting: PlaneProcess, mortal: PlaneProcess) -> None:
    assert mortal.ask("fork", address=lasting.address.decode(), block=lasting.block) == 7


def test_a_rank_is_refused_where_done_would_not_mean_in_place(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    pool = Pool("kv", PoolKind.KV, 16, 8, "float32", (Region(0, "kv", writer.block, 4096, 4096),))
    with pytest.raises(InvalidRequest) as refused:
        open_rank(RankConfig(engine="P", role=Role.PREFILL, pools=(pool,), data_plane="mooncake"))
    assert (refused.value.metadata["field"], refused.value.metadata["value"]) == ("MC_TCP_PROTO", "1")
