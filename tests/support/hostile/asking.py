"""A caller in a process of its own: ``python -m tests.support.hostile.asking ADDRESS METHOD CALLS BYTES``.

Sends that many unary calls at once on one connection, each with that many bytes of a field that no message has. Prints
how many ended with which status.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import grpc

FIELD_2047_BYTES = b"\xfa\x7f"


def main(address: str, method: str, calls: str, size: str) -> None:
    length, head = int(size), b""
    while length >= 128:
        head += bytes((length % 128 + 128,))
        length //= 128
    request = FIELD_2047_BYTES + head + bytes((length,)) + bytes(int(size))
    codes: Counter[str] = Counter()
    with grpc.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(method)
        for future in [call.future(request, timeout=100) for _ in range(int(calls))]:
            codes[future.code().name] += 1
    print(dict(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
