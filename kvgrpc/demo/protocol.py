"""The words of the demo's router and its processes: one JSON object a line over pipes.

A stand-in for an engine's own scheduler channel, which is no part of kvgrpc. Moments are seconds of CLOCK_MONOTONIC,
which all processes of a host share.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Open(Message, frozen=True):
    """Router to a rank: open it with this data plane at this registry. Answered by Opened or Refused."""

    data_plane: str
    registry: str
    storage: str = ""
    """Backend of the storage tier; empty: none."""
    storage_config: dict[str, str] = {}
    pulls: bool = False
    """It has a hierarchical cache, which lends pages to other engines and takes theirs."""


class Compute(Message, frozen=True):
    """Router to any engine: this prompt. Prefill and decode of one room get the same, the reference too."""

    room: int
    bootstrap_addr: str
    prompt: list[int]
    answer_tokens: int


class ClearCache(Message, frozen=True):
    """Router to a rank: empty the prefix cache (and say so in an event). Not answered."""


class Report(Message, frozen=True):
    """Router to a rank: answered by Reported."""


class Offload(Message, frozen=True):
    """Router to decode: move the cached pages of this prompt to storage, and drop them. Answered by Offloaded."""

    prompt: list[int]


class Resume(Message, frozen=True):
    """Router to decode: load what was prefetched for this prompt and answer it again. Answered by Resumed."""

    prompt: list[int]
    answer_tokens: int


class Close(Message, frozen=True):
    """Router to any process: end in good order."""


class Loaded(Message, frozen=True):
    """A process to the router: imports are done, Open may come."""


class Opened(Message, frozen=True):
    """The rank or registry serves at ``address``."""

    address: str
    page_bytes: int = 0


class Refused(Message, frozen=True):
    """It could not be opened; Open may be tried with another data plane. ``reason``: name of an ErrorReason."""

    reason: str
    message: str


class Prefilled(Message, frozen=True):
    """Prefill: the room's sender says Success. ``sent_at``: the moment of its last send."""

    room: int
    reused_pages: int
    compute_seconds: float
    sent_at: float


class Received(Message, frozen=True):
    """Decode: the room's receiver says Success. ``digest``: of the prompt's whole KV cache as it now lies here."""

    room: int
    pages: int
    reused_pages: int
    received_at: float
    digest: str


class AnswerToken(Message, frozen=True):
    """Decode or reference: the next token of an answer."""

    room: int
    token: int


class Finished(Message, frozen=True):
    """Decode or reference: the answer is complete. ``digest`` is the reference's own KV cache, "" from decode."""

    room: int
    digest: str = ""


class RoomFailed(Message, frozen=True):
    """Prefill or decode: the room failed. ``reason``: name of an ErrorReason."""

    room: int
    reason: str
    message: str


class Reported(Message, frozen=True):
    """A rank's report: names of the cached pages; bytes written, and seconds while a write was running."""

    cached: list[int]
    written_bytes: int
    writing_seconds: float


class Offloaded(Message, frozen=True):
    """Decode: so many pages were cached, and are in storage now; seconds from device to host, and to storage."""

    pages: int
    stored_pages: int
    nbytes: int
    copy_seconds: float
    store_seconds: float


class Resumed(Message, frozen=True):
    """Decode: the answer, the pages that were loaded and of those reused, seconds from the order to the first token."""

    tokens: list[int]
    loaded_pages: int
    reused_pages: int
    first_token_seconds: float


ToProcess = Open | Compute | ClearCache | Report | Offload | Resume | Close
ToRouter = (
    Loaded
    | Opened
    | Refused
    | Prefilled
    | Received
    | AnswerToken
    | Finished
    | RoomFailed
    | Reported
    | Offloaded
    | Resumed
)

to_process = msgspec.json.Decoder(ToProcess)
to_router = msgspec.json.Decoder(ToRouter)
encode = msgspec.json.encode
