"""Batches <-> the payload of a PUB message, the bytes that journal, replay and PUB share. Pure.

Written in two encodings and two dialects, byte for byte as the engines' own classes write them; read in all of them,
and in the versions between. docs/events.md is the specification.
"""

from kvgrpc.events.codec.decoder import check_batch, decode_batch
from kvgrpc.events.codec.encoder import RANK_FIELDS, BatchEncoder, Dialect, Encoding

__all__ = ["RANK_FIELDS", "BatchEncoder", "Dialect", "Encoding", "check_batch", "decode_batch"]
