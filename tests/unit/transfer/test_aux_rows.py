"""Aux rows: copied as they are, in order; an index that is none is refused."""

from __future__ import annotations

import ctypes

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.transfer.aux_rows import AuxBuffer, AuxRows

ITEMS, SIZES = 3, (4, 16, 8)


@pytest.fixture
def memory() -> list[ctypes.Array[ctypes.c_char]]:
    return [ctypes.create_string_buffer(bytes(range(size * ITEMS)), size * ITEMS) for size in SIZES]


@pytest.fixture
def rows(memory: list[ctypes.Array[ctypes.c_char]]) -> AuxRows:
    return AuxRows([AuxBuffer(ctypes.addressof(block), size, ITEMS) for block, size in zip(memory, SIZES, strict=True)])


def test_a_row_is_the_item_of_each_buffer_in_order(rows: AuxRows) -> None:
    assert rows.row_bytes == sum(SIZES)
    assert rows.read(1) == bytes(range(4, 8)) + bytes(range(16, 32)) + bytes(range(8, 16))


def test_what_is_read_is_a_copy(rows: AuxRows, memory: list[ctypes.Array[ctypes.c_char]]) -> None:
    row = rows.read(0)
    memory[0][0] = b"\xff"
    assert row[0] == 0


def test_a_row_is_written_to_its_place_alone(rows: AuxRows) -> None:
    before = rows.read(0), rows.read(2)
    rows.write(1, bytes([7]) * sum(SIZES))
    assert rows.read(1) == bytes([7]) * sum(SIZES)
    assert (rows.read(0), rows.read(2)) == before


@pytest.mark.parametrize("index", [-1, ITEMS, None, "1", 1.0])
def test_an_index_that_is_no_row_is_named(rows: AuxRows, index: object) -> None:
    with pytest.raises(InvalidRequest, match=r"aux_index: must be 0 to 2.*3 aux buffers") as refused:
        rows.read(index)  # type: ignore[arg-type]
    assert refused.value.metadata["field"] == "aux_index"


def test_without_buffers_there_is_no_row() -> None:
    none = AuxRows([])
    assert none.read(None) == b""
    with pytest.raises(InvalidRequest):
        none.check(0)
