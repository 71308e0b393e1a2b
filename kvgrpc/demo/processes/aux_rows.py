"""The row that goes with the last page of a room: its number, the answer's first token, the length of the prompt."""

from __future__ import annotations

import ctypes
import struct

from kvgrpc.server import AuxBuffer

ROWS = 64
_ROW = struct.Struct("<Qii")


class FreeAuxRows:
    """Rows in memory that kvgrpc reads at prefill and fills at decode. One thread."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(ROWS * _ROW.size)
        self._free = list(range(ROWS))
        self.buffer = AuxBuffer(ctypes.addressof(self._memory), _ROW.size, ROWS)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def release(self, row: int) -> None:
        self._free.append(row)

    def write(self, row: int, room: int, first_token: int, prompt_tokens: int) -> None:
        _ROW.pack_into(self._memory, row * _ROW.size, room, first_token, prompt_tokens)

    def read(self, row: int) -> tuple[int, int, int]:
        """Room, first token, tokens of the prompt."""
        room, first_token, prompt_tokens = _ROW.unpack_from(self._memory, row * _ROW.size)
        return room, first_token, prompt_tokens
