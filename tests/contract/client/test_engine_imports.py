"""What an engine needs comes from one place, and takes no pointers."""

from __future__ import annotations

import ctypes
import time

import numpy as np

from kvgrpc.server import (
    AuxBuffer,
    KVPoll,
    KVReceiver,
    KVSender,
    Pool,
    RankConfig,
    Role,
    open_decode,
    open_plane,
    open_prefill,
)

PAGES, TOKENS, HEADS, DIM = 16, 4, 2, 8


class Engine:
    """Two layers of keys and values, and aux rows, as arrays of shared memory that the engine's own plane gave."""

    def __init__(self, name: str, role: Role, registry: str = "") -> None:
        self.plane = open_plane("shm")
        shape = (2, 2, PAGES, TOKENS, HEADS, DIM)
        size = int(np.prod(shape)) * 4
        address = self.plane.allocate(size)
        memory = (ctypes.c_uint8 * size).from_address(address)
        self.cache = np.ctypeslib.as_array(memory).view(np.float32).reshape(shape)
        self.aux = np.zeros((8, 16), np.int64)
        pool = Pool.from_arrays(
            {(layer, part): self.cache[layer, number] for layer in range(2) for number, part in enumerate("kv")},
            page_tokens=TOKENS,
            axes="token,head,dim",
        )
        config = RankConfig(
            engine=name,
            role=role,
            pools=(pool,),
            aux=AuxBuffer.from_arrays([self.aux]),
            data_plane=self.plane,
            registry=registry,
        )
        self.rank = open_prefill(config) if role is Role.PREFILL else open_decode(config)

    def close(self) -> None:
        self.rank.close(2.0)
        self.plane.close(1.0)


def test_arrays_move_and_stay_readable_after_close() -> None:
    prefill, decode = Engine("P", Role.PREFILL, "embedded"), Engine("D", Role.DECODE)
    prefill.cache[:] = np.random.default_rng(7).random(prefill.cache.shape)
    prefill.aux[3] = np.arange(16)
    receiver = KVReceiver(decode.rank.transfer, prefill.rank.address, 7)  # type: ignore[arg-type]
    sender = KVSender(prefill.rank.transfer, prefill.rank.address, 7)  # type: ignore[arg-type]
    receiver.init(np.array([1, 2]), aux_index=5)
    sender.init(2, aux_index=3)
    sender.send(np.array([8, 9]))
    end = time.monotonic() + 20
    while not receiver.ended:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert receiver.poll() is KVPoll.Success, receiver.failure
    decode.rank.close(2.0)
    assert np.array_equal(decode.cache[:, :, 1:3], prefill.cache[:, :, 8:10])
    assert np.array_equal(decode.aux[5], np.arange(16))
    decode.plane.close(1.0)
    prefill.close()
