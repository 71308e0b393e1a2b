"""A page as it was stored before headers named the algorithm of their checksum: bytes of then, not of today's code."""

from __future__ import annotations


def _header(text: str) -> bytes:
    return bytes.fromhex(text).ljust(4096, b"\0")


KEY = "some-key"
PAGE = bytes(number * 7 % 256 for number in range(10_000))
CHECKED = _header(
    "6b766772706300011027000000000000987dc09a744e280208000000736f6d652d6b6579d2e40156365ebd1588f651b008caeac9"
)
# Of another page, of five bytes, without a checksum.
UNCHECKED = _header(
    "6b766772706300010500000000000000000000000000000008000000736f6d652d6b6579ff9384cf1b00400771d84f53371cc628"
)
# What a file of hf3fs says of itself, of 4 slots for pages of up to 12,288 bytes.
HF3FS = _header(
    "6b76677270630001001001000000000000000000000000002d000000"
    "6b7667727063206866336673206c61796f757420312c203420736c6f7473206f66203136333834206279746573"
    "e94f88dc814895ec2c47520767216f25"
)
