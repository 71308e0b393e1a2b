"""What the Store's codes mean for a page."""

from __future__ import annotations

from kvgrpc.prefetch.storage.base import MISSING, PageResult, failed

EXISTS = 1
"""Ours: the object was there before the put, which the Store itself reports as a success."""
EXPIRED = -20_000
"""Ours: the process that talks to the Store came to it after its deadline, and did not begin."""
INVALID = -600
NOT_READY = -703
LEASE_ENDED = -707
TRANSFER_FAILED = -800
MASTER_DOWN = frozenset({-900, -901, -1010})

_MISSING = frozenset({-704, -710, -712})
_WORDS = {
    -1: ("internal error", False),
    -10: ("more buffer space is needed than the client has", True),
    -101: ("the segment is gone", True),
    -103: ("the master does not know this client any more", True),
    -200: ("no space: every segment is full, or its owner is gone, and leases keep old objects for some seconds", True),
    -400: ("invalid key", False),
    -500: ("write failed", True),
    INVALID: ("invalid parameters", False),
    -601: ("illegal client", True),
    -700: ("invalid write", True),
    -701: ("invalid read", True),
    -702: ("invalid replica", True),
    NOT_READY: ("another client is still writing it, or the store is so full that it was evicted at once", True),
    -705: ("another client is still writing it", True),
    -706: ("a reader has a lease on it", True),
    LEASE_ENDED: ("the lease ended before the transfer did", True),
    -714: ("a replica is busy", True),
    TRANSFER_FAILED: ("the transfer failed: the owner of its segment may be gone", True),
    -801: ("the checksum does not match", True),
    -900: ("the master does not answer", True),
    -901: ("the master does not answer", True),
    -1010: ("the master is not ready", True),
    -1012: ("not supported", False),
    EXPIRED: ("not begun in time", True),
}


def result_of(code: int) -> PageResult:
    """The result of a negative code."""
    if code in _MISSING:
        return MISSING
    words, retryable = _WORDS.get(code, ("unknown code", True))
    return failed(f"Mooncake Store {code}: {words}", retryable=retryable)


def is_lost(code: int) -> bool:
    """Whether the Store may go on saying that the object exists although nobody can read it (until client_ttl)."""
    return code == TRANSFER_FAILED
