"""Domain exceptions <-> google.rpc.Status, both ways, in one place. ``errors.py`` says which code each reason has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from kvgrpc.errors import KvGrpcError, Reason, Violation, exception_of

DOMAIN = "kvgrpc.dev"
DETAILS_KEY = "grpc-status-details-bin"
# gRPC drops headers above 16 KiB, and some at random above 8 KiB; the real error is lost then. The text travels twice,
# percent-encoded in one place, and the details in base64: with these bounds all of it stays below 8 KiB.
MAX_STATUS_BYTES = 4096
MAX_MESSAGE_BYTES = 1024
MAX_ENCODED_MESSAGE_BYTES = 2048
_MAX_KEYS = 32
_MAX_KEY_BYTES = 64
# Tried in this order until the status fits: bytes of each value, and how many violations.
_CUTS = ((1024, 32), (256, 8), (64, 2), (16, 0))


def status_of(error: KvGrpcError) -> status_pb2.Status:
    """The status of an exception: ErrorInfo always, RetryInfo and BadRequest where they apply, at most 4 KiB.

    What does not fit is cut: long values first, then violations from the end.
    """
    code: grpc.StatusCode = getattr(grpc.StatusCode, error.code)
    for value_bytes, violations in _CUTS:
        status = status_pb2.Status(code=code.value[0], message=_text(error.message))
        for detail in _details(error, value_bytes, error.violations[:violations]):
            status.details.add().Pack(detail)
        if status.ByteSize() <= MAX_STATUS_BYTES:
            break
    return status


def trailing(error: KvGrpcError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """Code, text and trailing metadata for ``context.abort``."""
    status = status_of(error)
    return getattr(grpc.StatusCode, error.code), status.message, ((DETAILS_KEY, status.SerializeToString()),)


def error_from(error: grpc.RpcError) -> KvGrpcError:
    """The domain exception of a failed call, of grpc.aio or of the synchronous API.

    A status that is not ours is a bare KvGrpcError with the code of the library or the network; so is a reason that
    only a newer version knows, which keeps its name under the metadata key ``reason``.
    """
    code = error.code() if hasattr(error, "code") else grpc.StatusCode.UNKNOWN
    text = (error.details() if hasattr(error, "details") else "") or code.name
    known = _from_details(_details_in(error), code, text)
    if known is None:
        known = _with_code(KvGrpcError(text, metadata={"grpcCode": code.name}), code)
    known.answered = True
    return known


def _details(error: KvGrpcError, value_bytes: int, violations: tuple[Violation, ...]) -> list[Message]:
    if not error.reason:
        return []  # an exception that stands for a bare code, as the health protocol has one
    info = error_details_pb2.ErrorInfo(
        reason=error.reason.full_name, domain=DOMAIN, metadata=_cut_metadata(error.metadata, value_bytes)
    )
    details: list[Message] = [info]
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(max(0, round(error.retry_after * 1000)))
        details.append(retry)
    if violations:
        bad = error_details_pb2.BadRequest()
        for violation in violations:
            field, description = _cut(violation.field, value_bytes), _cut(violation.description, value_bytes)
            bad.field_violations.add(field=field, description=description)
        details.append(bad)
    return details


def _cut_metadata(metadata: Mapping[str, str], value_bytes: int) -> dict[str, str]:
    pairs = list(metadata.items())[:_MAX_KEYS]
    return {_cut(key, _MAX_KEY_BYTES): _cut(value, value_bytes) for key, value in pairs}


def _text(message: str) -> str:
    """A message that fits: its printable ASCII characters travel as they are, every other byte as three."""
    raw = _cut(message, MAX_MESSAGE_BYTES).encode()
    cost = 0
    for index, byte in enumerate(raw):
        cost += 1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3
        if cost > MAX_ENCODED_MESSAGE_BYTES:
            return raw[:index].decode(errors="ignore")
    return raw.decode()


def _cut(text: str, size: int) -> str:
    # "replace": text of file names and of other people's errors may hold lone surrogates, which protobuf refuses.
    raw = text.encode(errors="replace")
    return raw.decode() if len(raw) <= size else raw[:size].decode(errors="ignore")


def _details_in(error: grpc.RpcError) -> status_pb2.Status | None:
    # Pairs in both APIs, though their types differ.
    trailing_metadata: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailing_metadata or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _from_details(status: status_pb2.Status | None, code: grpc.StatusCode, text: str) -> KvGrpcError | None:
    info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    for detail in status.details if status is not None else ():
        for message in (info, retry, bad):
            if detail.Is(message.DESCRIPTOR) and not _unpacked(detail, message):
                return None
    if info.domain != DOMAIN:
        return None
    reason = Reason.__members__.get(info.reason.removeprefix("ERROR_REASON_"), Reason.UNSPECIFIED)
    metadata = dict(info.metadata) if reason else {**info.metadata, "reason": info.reason}
    error = _class_of(reason, code.name)(
        text,
        metadata=metadata,
        retry_after=max(0.0, retry.retry_delay.ToMilliseconds() / 1000) if retry.HasField("retry_delay") else None,
        violations=[Violation(each.field, each.description) for each in bad.field_violations],
    )
    return _with_code(error, code)


def _unpacked(detail: Message, message: Message) -> bool:
    try:
        detail.Unpack(message)  # type: ignore[attr-defined]  # google.rpc has no stubs: it is an Any
    except DecodeError:
        return False
    return True


def _class_of(reason: Reason, code: str) -> type[KvGrpcError]:
    """The exception of the reason, or the narrower one of it that this code means."""
    general = exception_of(reason)
    narrower = general.__subclasses__() if reason and general.code != code else []
    return next((known for known in narrower if known.reason is reason and known.code == code), general)


def _with_code(error: KvGrpcError, code: grpc.StatusCode) -> KvGrpcError:
    if error.code != code.name:
        error.code = code.name  # type: ignore[misc]  # what was sent counts, not what the class would send
    return error
