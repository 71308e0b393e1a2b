"""The HTTP of the demo's services: a question is JSON, and so is its answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Annotated

import msgspec

from kvgrpc.demo.prompts import ANSWER_TOKENS, LONGEST_PROMPT, tokens_of
from kvgrpc.errors import AddressNotAllowed
from kvgrpc.net import check_listen, joined, port_of, split
from kvgrpc.observability.bounded_http import POLL_SECONDS, BoundedHandler, BoundedHttpServer

Ask = Callable[["GenerateRequest"], "GenerateAnswer"]
ANSWER_SECONDS = 60.0
LONGEST_BODY = 1 << 20
WHAT_IS_HERE = "GET /health and POST /generate are here"
Token = Annotated[int, msgspec.Meta(ge=0, le=1023)]


class GenerateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt, as text or as tokens, and how many are wanted after it. An engine is told the ``room``, a router draws
    one."""

    prompt: str | list[Token]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=ANSWER_TOKENS)] = ANSWER_TOKENS
    room: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0

    def prompt_tokens(self) -> list[int]:
        return list(tokens_of(self.prompt)) if isinstance(self.prompt, str) else self.prompt


class GenerateAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a question: prefill has no tokens to tell. ``failure``: why there are none."""

    room: int = 0
    tokens: list[int] = []
    failure: str = ""


class NotAnswered(Exception):
    """The question gets no answer; ``code`` is HTTP's."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code, self.why = code, why


question = msgspec.json.Decoder(GenerateRequest)
answer = msgspec.json.Decoder(GenerateAnswer)


class GenerateServer:
    """Serves from construction to ``close``: ``POST /generate`` is answered by ``ask``, on a thread for each question,
    and ``GET /health`` by ``healthy``. Raises AddressNotAllowed for an address that is taken."""

    def __init__(self, listen: str, ask: Ask, healthy: Callable[[], bool]) -> None:
        host, port = split(check_listen(listen, "--listen", unix=False))
        try:
            self._server = _Server(host, port_of(port, lowest=0) or 0, ask, healthy)
        except OSError as error:
            raise AddressNotAllowed(
                f"--listen: cannot listen on {listen}: {error.strerror or error}; port 0 takes a free one",
                metadata={"address": listen, "configKey": "listen"},
            ) from None
        self.address = joined(host, self._server.server_address[1])
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(POLL_SECONDS,), name="demo-questions", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(BoundedHttpServer):
    # What was asked is answered before the process ends.
    daemon_threads = False
    block_on_close = True

    def __init__(self, host: str, port: int, ask: Ask, healthy: Callable[[], bool]) -> None:
        self.ask, self.healthy = ask, healthy
        super().__init__(host, port, _Handler, ANSWER_SECONDS + 2 * BoundedHandler.timeout)


class _Handler(BoundedHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.path != "/health":
            return self._say(404, {"failure": WHAT_IS_HERE})
        healthy = self.server.healthy()
        self._say(200 if healthy else 503, {"serving": healthy})

    def do_POST(self) -> None:
        try:
            said = self.server.ask(self._question())
        except NotAnswered as refused:
            return self._say(refused.code, {"failure": refused.why})
        self._say(502 if said.failure else 200, said)

    def _question(self) -> GenerateRequest:
        if self.path != "/generate":
            raise NotAnswered(404, WHAT_IS_HERE)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LONGEST_BODY:
            raise NotAnswered(413, f"a question says its length, at most {LONGEST_BODY} bytes")
        try:
            asked = question.decode(self.rfile.read(int(length)))
        except msgspec.DecodeError as error:
            raise NotAnswered(400, f'{error}; a question is {{"prompt": "some text"}}') from None
        if not 0 < len(asked.prompt_tokens()) <= LONGEST_PROMPT:
            raise NotAnswered(400, f"a prompt has 1 to {LONGEST_PROMPT} tokens")
        return asked

    def _say(self, code: int, body: object) -> None:
        self.answer(code, "application/json", msgspec.json.encode(body) + b"\n")
