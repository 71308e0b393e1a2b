"""Tells a failure: what happened, what to do next, and with which exit code."""

from __future__ import annotations

from kvgrpc.errors import AddressNotAllowed, InvalidRequest, KvGrpcError, Reason
from kvgrpc.observability.logging import one_line

INTERRUPTED = 130
WRONG_USAGE = 2
# As grpcurl does: 64 + the number of the status code.
STATUS_EXIT = 64
_LONGEST_MESSAGE = 1024
_OF_A_FIELD = ("field", "rule", "value")

NEXT_STEP = {
    Reason.ENGINE_NOT_FOUND: "`kvgrpc engines` lists what is registered.",
    Reason.WARMING_UP: "The registry has just started; repeat this in a few seconds.",
    Reason.ROOM_NOT_FOUND: "`kvgrpc rooms` lists the rooms of a rank; a settled one is soon forgotten.",
    Reason.OPERATION_NOT_FOUND: "`kvgrpc prefetch list` lists the operations of a rank.",
    Reason.STREAM_NOT_FOUND: "`kvgrpc streams` lists the streams of a rank; pp = cp = tp = 0 of each dp publishes.",
    Reason.EVENTS_COMPACTED: "These events are gone. Leave out --from to read from the oldest that is kept.",
    Reason.EVENTS_SEQUENCE_IN_FUTURE: "`kvgrpc streams` shows the next sequence.",
    Reason.STALE_LOG: "Numbering has restarted. Leave out --log and --from to read the current log.",
    Reason.CREDENTIALS_INVALID: "Give --token-file, or a certificate with --cert-file and --key-file.",
    Reason.WRONG_AUDIENCE: "Dial it as it calls itself, or give --audience where --server is a tunnel to it.",
    Reason.CREDENTIALS_EXPIRED: "This command makes a token for each call, so the two clocks differ: set them.",
    Reason.PERMISSION_DENIED: "Use a token or certificate of a role that may do this: docs/operations.md lists them.",
    Reason.SERVER_DRAINING: "It is shutting down: ask another one.",
    Reason.FEATURE_DISABLED: "The right server? `kvgrpc info` lists what it serves; --fleet asks a registry's ranks.",
    Reason.CHECKSUM_MISMATCH: "Ask again; where it repeats between two hosts, suspect their memory or network.",
    Reason.INTERNAL: "This is a bug. The server's log has the request id.",
}
# A status that the library or the network made, by its code.
NEXT_STEP_AFTER_FOREIGN = {
    "UNIMPLEMENTED": "Is this the right server? `kvgrpc info` lists what it serves, `kvgrpc ranks` where ranks listen.",
    "NOT_FOUND": "`kvgrpc health` without a name lists the services.",
}


class ToldWith(Exception):
    """A failure whose next step is known better here than from its reason."""

    def __init__(self, error: KvGrpcError, next_step: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.next_step = next_step


def explain(error: KvGrpcError, next_step: str = "") -> int:
    """Prints the failure to stderr, with this next step or that of its reason; the exit code."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    name = error.reason.name if error.reason else error.code
    console.print(Text.assemble((name, "bold red"), ": ", one_line(error.message, _LONGEST_MESSAGE)))
    # The message has them of a wrong field.
    said = _OF_A_FIELD if error.violations else ()
    for key, value in sorted(error.metadata.items()):
        if value and error.reason and key not in said:
            console.print(Text.assemble("  ", (one_line(key), "dim"), f" {one_line(value)}"))
    for violation in error.violations[1:] and error.violations:
        console.print(
            Text.assemble("  ", (one_line(violation.field), "yellow"), f": {one_line(violation.description)}")
        )
    if error.retry_after is not None:
        console.print(f"  It may be repeated after {error.retry_after:g} s.")
    of_reason = NEXT_STEP.get(error.reason, "") if error.reason else NEXT_STEP_AFTER_FOREIGN.get(error.code, "")
    next_step = next_step or of_reason
    if next_step:
        console.print(Text(next_step, style="cyan"))
    return exit_code(error)


def exit_code(error: KvGrpcError) -> int:
    """A server's refusal tells scripts its status code; what was wrong before one was asked is wrong usage."""
    import grpc

    if isinstance(error, InvalidRequest | AddressNotAllowed) and not error.answered:
        return WRONG_USAGE
    return STATUS_EXIT + int(grpc.StatusCode[error.code].value[0])
