"""The position of a Watch, so that another call can go on with it."""

from __future__ import annotations

from kvgrpc.v1 import event_service_pb2 as pb


class Cursor:
    """The first request, and what remains of it after the messages that were heard."""

    def __init__(self, request: pb.WatchRequest) -> None:
        self._request = request
        self._begun = False
        self._log_id = ""

    @property
    def request(self) -> pb.WatchRequest:
        """The call that goes on, or begins."""
        return self._request

    @property
    def begun(self) -> bool:
        """True if it was heard at all."""
        return self._begun

    @property
    def complete(self) -> bool:
        """True if a replay has said all."""
        request = self._request
        ends = request.mode == pb.WATCH_MODE_REPLAY and request.HasField("end_sequence")
        return self._begun and ends and request.from_sequence > request.end_sequence

    def hear(self, message: pb.WatchResponse) -> bool:
        """Moves on. False for what is no news: that a call which goes on has begun."""
        kind = message.WhichOneof("kind")
        if kind == "begin":
            return self._begin(message.begin)
        if kind == "raw":
            self._go_on(message.raw.first_sequence + len(message.raw.payloads))
        elif kind == "typed":
            self._go_on(message.typed.first_sequence + len(message.typed.batches))
        elif kind == "dropped":
            self._go_on(message.dropped.last_sequence + 1)
        elif kind == "snapshot" and message.snapshot.last:
            self._request.mode = pb.WATCH_MODE_TAIL
            self._go_on(message.snapshot.next_sequence)
        return True

    def _begin(self, begin: pb.WatchBegin) -> bool:
        news, self._begun = not self._begun, True
        request = self._request
        if request.mode == pb.WATCH_MODE_SNAPSHOT:
            # Until it is complete another call takes another one, of whatever log is current then.
            request.log_id = ""
            self._log_id = begin.stream.log_id
            return True
        request.log_id = begin.stream.log_id
        whole = request.mode == pb.WATCH_MODE_REPLAY and not request.HasField("end_sequence")
        if whole and begin.stream.next_sequence > begin.first_sequence:
            request.end_sequence = begin.stream.next_sequence - 1
        if request.mode != pb.WATCH_MODE_HEARTBEAT:
            request.from_sequence = begin.first_sequence
        return news

    def _go_on(self, sequence: int) -> None:
        if not self._request.log_id:
            self._request.log_id = self._log_id
        self._request.from_sequence = sequence
