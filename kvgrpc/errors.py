"""Every failure that kvgrpc names: one exception for each ErrorReason, and the record that travels in streams.

Stdlib only. The numbers are those of ``protos/kvgrpc/v1/error_reason.proto`` (a test compares); the gRPC code is kept
by name so that nothing here needs grpc. ``kvgrpc.rpc.status`` turns these into statuses and back.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

__all__ = [
    "MAX_MESSAGE_CHARS",
    "AddressNotAllowed",
    "CallTooLong",
    "ChecksumMismatch",
    "CopyFailed",
    "CredentialsExpired",
    "CredentialsInvalid",
    "EngineNotFound",
    "EventsCompacted",
    "EventsSequenceInFuture",
    "Failure",
    "FeatureDisabled",
    "FrameTooLarge",
    "IdentityMismatch",
    "Internal",
    "InvalidRequest",
    "KvGrpcError",
    "KvIndexOutOfRange",
    "OldShapeStillLeased",
    "OperationNotFound",
    "PageStateInvalid",
    "PagesHeld",
    "PagesInUse",
    "ParallelLayoutMismatch",
    "PeerLost",
    "PeerUnreachable",
    "PermissionDenied",
    "Reason",
    "RegistrationShapeConflict",
    "RequestIdReused",
    "RoomCancelled",
    "RoomConflict",
    "RoomDeadline",
    "RoomNotFound",
    "ServerDraining",
    "StaleEpoch",
    "StaleLog",
    "StorageFailed",
    "StoreUnavailable",
    "StreamNotFound",
    "TooManyRequests",
    "TransferFailed",
    "Violation",
    "WarmingUp",
    "WrongAudience",
    "WrongRank",
    "exception_of",
]


MAX_MESSAGE_CHARS = 1024
_SHOWN_CHARS = 200


class Reason(enum.IntEnum):
    """Why something failed; the comments of error_reason.proto say the metadata keys and what to do."""

    UNSPECIFIED = 0
    ROOM_NOT_FOUND = 1
    ROOM_CONFLICT = 2
    ROOM_CANCELLED = 3
    ROOM_DEADLINE = 4
    PEER_LOST = 5
    STALE_EPOCH = 6
    PARALLEL_LAYOUT_MISMATCH = 7
    KV_INDEX_OUT_OF_RANGE = 8
    TRANSFER_FAILED = 9
    TOO_MANY_REQUESTS = 10
    PAGES_HELD = 11
    INVALID_REQUEST = 12
    SERVER_DRAINING = 13
    FRAME_TOO_LARGE = 14
    REGISTRATION_SHAPE_CONFLICT = 15
    ENGINE_NOT_FOUND = 16
    WARMING_UP = 17
    WRONG_RANK = 18
    EVENTS_COMPACTED = 19
    EVENTS_SEQUENCE_IN_FUTURE = 20
    STALE_LOG = 21
    STREAM_NOT_FOUND = 22
    CREDENTIALS_INVALID = 23
    PERMISSION_DENIED = 24
    FEATURE_DISABLED = 25
    ADDRESS_NOT_ALLOWED = 26
    INTERNAL = 27
    PEER_UNREACHABLE = 28
    CALL_TOO_LONG = 29
    CHECKSUM_MISMATCH = 30
    WRONG_AUDIENCE = 31
    CREDENTIALS_EXPIRED = 32
    PAGES_IN_USE = 33
    IDENTITY_MISMATCH = 35
    OPERATION_NOT_FOUND = 50
    REQUEST_ID_REUSED = 51
    STORAGE_FAILED = 52
    COPY_FAILED = 53
    PAGE_STATE_INVALID = 54
    STORE_UNAVAILABLE = 60

    @property
    def full_name(self) -> str:
        """The name of the proto value, which is what ErrorInfo.reason carries."""
        return f"ERROR_REASON_{self.name}"


@dataclass(frozen=True, slots=True)
class Violation:
    """One field that is wrong: its path, what would be right, and what it is (which BadRequest has no place for)."""

    field: str
    description: str
    value: object = dataclasses.field(default=None, compare=False)


class KvGrpcError(Exception):
    """Base of all domain exceptions.

    ``message`` says what happened and what to do about it; ``metadata`` holds the documented keys, ``retry_after`` the
    seconds after which the same call may be repeated (None: do not), ``violations`` the wrong fields of a request.
    ``answered``: whether the status of a call said it; else it was found in this process.
    """

    reason: ClassVar[Reason] = Reason.UNSPECIFIED
    code: ClassVar[str] = "UNKNOWN"
    answered = False

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, object] | None = None,
        retry_after: float | None = None,
        violations: Sequence[Violation] = (),
    ) -> None:
        super().__init__(message)
        self.message = message[:MAX_MESSAGE_CHARS]
        self.metadata: dict[str, str] = {key: str(value) for key, value in (metadata or {}).items()}
        self.retry_after = retry_after
        self.violations = tuple(violations)

    def __str__(self) -> str:
        return f"{self.reason.name}: {self.message}"


class RoomNotFound(KvGrpcError):
    """There is no such room, or nobody local claimed it in time. Do not repeat the call."""

    reason, code = Reason.ROOM_NOT_FOUND, "NOT_FOUND"


class RoomConflict(KvGrpcError):
    """Another decode or local handle owns the room, or its pages changed. Retry the request with a new attempt."""

    reason, code = Reason.ROOM_CONFLICT, "ALREADY_EXISTS"


class RoomCancelled(KvGrpcError):
    """An engine, a peer or an operator cancelled the room (``metadata`` says who). Do not retry by yourself."""

    reason, code = Reason.ROOM_CANCELLED, "ABORTED"


class RoomDeadline(KvGrpcError):
    """A state of the room ran out of time. Retry the request with a new attempt."""

    reason, code = Reason.ROOM_DEADLINE, "ABORTED"


class PeerLost(KvGrpcError):
    """The other rank died, hung or was cut off. Retry the request elsewhere, or here once it is back."""

    reason, code = Reason.PEER_LOST, "ABORTED"


class StaleEpoch(KvGrpcError):
    """The named incarnation or lease is not the current one. Resolve or register again, then retry."""

    reason, code = Reason.STALE_EPOCH, "FAILED_PRECONDITION"


class ParallelLayoutMismatch(KvGrpcError):
    """The layouts or pools of two ranks do not fit together. Route elsewhere, or configure both alike."""

    reason, code = Reason.PARALLEL_LAYOUT_MISMATCH, "FAILED_PRECONDITION"


class KvIndexOutOfRange(KvGrpcError):
    """A page number outside its pool. Fix the caller."""

    reason, code = Reason.KV_INDEX_OUT_OF_RANGE, "OUT_OF_RANGE"


class TransferFailed(KvGrpcError):
    """The data plane could not write the pages. Retry the request with a new attempt."""

    reason, code = Reason.TRANSFER_FAILED, "ABORTED"


class TooManyRequests(KvGrpcError):
    """A bound was reached. Repeat the call after ``retry_after`` where there is one, else send less."""

    reason, code = Reason.TOO_MANY_REQUESTS, "RESOURCE_EXHAUSTED"


class PagesHeld(KvGrpcError):
    """Too many pages wait for proof that nobody writes to them any more. Wait, or send the request elsewhere."""

    reason, code = Reason.PAGES_HELD, "RESOURCE_EXHAUSTED"


class InvalidRequest(KvGrpcError):
    """A request with malformed content: ``metadata`` names field, value and rule. Fix the request."""

    @classmethod
    def of(cls, field: str, value: object, rule: str, **metadata: object) -> InvalidRequest:
        """``field`` must be what ``rule`` says, and is ``value``."""
        shown = repr(value)[:_SHOWN_CHARS] if isinstance(value, str) else str(value)[:_SHOWN_CHARS]
        return cls(
            f"{field}: must be {rule}, not {shown}",
            metadata={**metadata, "field": field, "value": shown, "rule": rule},
            violations=[Violation(field, rule)],
        )

    def inside(self, where: str) -> InvalidRequest:
        """The error of a field of ``where``, as ``of`` makes it; of ``where`` itself, where no field was named."""
        old, rule = self.metadata["field"], self.metadata["rule"]
        field = f"{where}.{old}" if old else where
        metadata = {**self.metadata, "field": field}
        return InvalidRequest(field + self.message[len(old) :], metadata=metadata, violations=[Violation(field, rule)])

    reason, code = Reason.INVALID_REQUEST, "INVALID_ARGUMENT"


class ServerDraining(KvGrpcError):
    """The server drains and takes nothing new. Go elsewhere, or come back later."""

    reason, code = Reason.SERVER_DRAINING, "UNAVAILABLE"


class FrameTooLarge(KvGrpcError):
    """A frame is larger than the receiver allowed. Ask for fewer pages, or raise ``max_frame_bytes``."""

    reason, code = Reason.FRAME_TOO_LARGE, "INVALID_ARGUMENT"


class RegistrationShapeConflict(KvGrpcError):
    """The same rank is registered with another shape. Fix the configuration, or deregister the other one."""

    reason, code = Reason.REGISTRATION_SHAPE_CONFLICT, "ALREADY_EXISTS"


class OldShapeStillLeased(RegistrationShapeConflict):
    """The other shape belongs to an older incarnation whose lease still runs; ``retry_after`` says how long."""

    reason, code = Reason.REGISTRATION_SHAPE_CONFLICT, "UNAVAILABLE"


class EngineNotFound(KvGrpcError):
    """The registry has no such engine, or not all of its ranks are READY. Wait for it, or route elsewhere."""

    reason, code = Reason.ENGINE_NOT_FOUND, "NOT_FOUND"


class WarmingUp(KvGrpcError):
    """The registry restarted and may not know every engine yet. Ask again after ``retry_after``."""

    reason, code = Reason.WARMING_UP, "UNAVAILABLE"


class WrongRank(KvGrpcError):
    """A rank answered that is not the one that was looked for. Resolve again, or dial the address in ``metadata``."""

    reason, code = Reason.WRONG_RANK, "FAILED_PRECONDITION"


class EventsCompacted(KvGrpcError):
    """The events that were asked for are no longer kept. Rebuild the index, then read from the oldest."""

    reason, code = Reason.EVENTS_COMPACTED, "OUT_OF_RANGE"


class EventsSequenceInFuture(KvGrpcError):
    """Events were asked for that nobody published yet. Read from the next sequence in ``metadata``."""

    reason, code = Reason.EVENTS_SEQUENCE_IN_FUTURE, "OUT_OF_RANGE"


class StaleLog(KvGrpcError):
    """The cursor belongs to an earlier log, whose numbers mean nothing now. Rebuild from the current log."""

    reason, code = Reason.STALE_LOG, "ABORTED"


class StreamNotFound(KvGrpcError):
    """There is no such event stream here. Ask the rank of that engine and dp."""

    reason, code = Reason.STREAM_NOT_FOUND, "NOT_FOUND"


class CredentialsInvalid(KvGrpcError):
    """Credentials are missing or wrong. Use those of this server."""

    reason, code = Reason.CREDENTIALS_INVALID, "UNAUTHENTICATED"


class WrongAudience(KvGrpcError):
    """A token was made for another server. Dial it by a name of its own, or add the name to its ``audience``."""

    reason, code = Reason.WRONG_AUDIENCE, "UNAUTHENTICATED"


class CredentialsExpired(KvGrpcError):
    """A token is older than the clocks of two hosts may differ, or of later than now. Make a new one."""

    reason, code = Reason.CREDENTIALS_EXPIRED, "UNAUTHENTICATED"


class PermissionDenied(KvGrpcError):
    """The caller's role may not do this. Use credentials of an allowed role."""

    reason, code = Reason.PERMISSION_DENIED, "PERMISSION_DENIED"


class FeatureDisabled(KvGrpcError):
    """Built or started without this feature; ``metadata`` says how to enable it."""

    reason, code = Reason.FEATURE_DISABLED, "UNIMPLEMENTED"


class AddressNotAllowed(KvGrpcError):
    """An address that may not be dialled or bound, or cannot be right. Fix it, or allow it in the configuration."""

    reason, code = Reason.ADDRESS_NOT_ALLOWED, "INVALID_ARGUMENT"


class Internal(KvGrpcError):
    """A bug in kvgrpc. The server's log has the cause under the request id in ``metadata``: report it."""

    reason, code = Reason.INTERNAL, "INTERNAL"

    @staticmethod
    def of(what: str, request_id: str) -> Internal:
        """``what`` failed by a bug; the log has the cause beside ``request_id``."""
        text = f"{what}: a bug here; its log has the cause under request id {request_id}"
        return Internal(text, metadata={"requestId": request_id})


class PeerUnreachable(KvGrpcError):
    """Nobody answered at an address in time. Check the address and the network, then retry."""

    reason, code = Reason.PEER_UNREACHABLE, "UNAVAILABLE"


class CallTooLong(KvGrpcError):
    """A call without a deadline took as long as the server allows. Repeat it with a deadline."""

    reason, code = Reason.CALL_TOO_LONG, "DEADLINE_EXCEEDED"


class OperationNotFound(KvGrpcError):
    """There is no such prefetch or backup here, or it ended long ago. Do not repeat the call."""

    reason, code = Reason.OPERATION_NOT_FOUND, "NOT_FOUND"


class RequestIdReused(KvGrpcError):
    """The request id was used for an operation with other pages. Use a new id."""

    reason, code = Reason.REQUEST_ID_REUSED, "ALREADY_EXISTS"


class ChecksumMismatch(KvGrpcError):
    """The pages that arrived differ from those sent. Retry with a new attempt; where it repeats, suspect memory."""

    reason, code = Reason.CHECKSUM_MISMATCH, "DATA_LOSS"


class PagesInUse(KvGrpcError):
    """An engine gave a page that another of its rooms still has. A bug of the engine or its adapter."""

    reason, code = Reason.PAGES_IN_USE, "FAILED_PRECONDITION"


class StorageFailed(KvGrpcError):
    """The storage backend did not do what was asked. Compute the pages, or try again."""

    reason, code = Reason.STORAGE_FAILED, "UNAVAILABLE"


class CopyFailed(KvGrpcError):
    """A copy between device and host failed or came too late. Compute the pages."""

    reason, code = Reason.COPY_FAILED, "ABORTED"


class PageStateInvalid(KvGrpcError):
    """A pool's page was freed, read or filled by a caller that may not. A bug of the caller."""

    reason, code = Reason.PAGE_STATE_INVALID, "FAILED_PRECONDITION"


class IdentityMismatch(KvGrpcError):
    """The caller's token or certificate is for other ranks. Use the rank's own, or widen its scope at the server."""

    reason, code = Reason.IDENTITY_MISMATCH, "PERMISSION_DENIED"


class StoreUnavailable(KvGrpcError):
    """The registry does not reach its store. Ask again after ``retry_after``, or ask another replica."""

    reason, code = Reason.STORE_UNAVAILABLE, "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class Failure:
    """The root cause of a failed room: an exception as a value that travels in streams and records.

    ``origin`` names who saw it first ("engine/dp0/pp0/cp0/tp0@epoch", empty: this process), ``time`` is Unix seconds.
    ``retry_after``: seconds before which another attempt is of no use; None: it depends on something else.
    """

    reason: Reason
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    origin: str = ""
    time: float = field(default_factory=time.time)
    retry_after: float | None = None

    @classmethod
    def of(cls, error: KvGrpcError, origin: str = "") -> Failure:
        return cls(error.reason, error.message, dict(error.metadata), origin, retry_after=error.retry_after)

    def exception(self) -> KvGrpcError:
        """The exception of this reason, for callers that want to raise it."""
        return exception_of(self.reason)(self.message, metadata=self.metadata, retry_after=self.retry_after)


def exception_of(reason: Reason) -> type[KvGrpcError]:
    """The exception class of a reason; KvGrpcError itself for one that this version does not know."""
    return _BY_REASON.get(reason, KvGrpcError)


_BY_REASON: dict[Reason, type[KvGrpcError]] = {}
for _class in KvGrpcError.__subclasses__():
    _BY_REASON.setdefault(_class.reason, _class)
del _class
