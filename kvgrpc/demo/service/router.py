"""The router of the demo's services: it draws a room and asks both engines at once, as routers of real engines do."""

from __future__ import annotations

import secrets
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from kvgrpc.demo.service.questions import ANSWER_SECONDS, GenerateAnswer, GenerateRequest, GenerateServer, answer

AT_ONCE = 64
HEALTH_SECONDS = 2.0
# No proxy stands between processes of one fleet, whatever the environment says.
_open = build_opener(ProxyHandler({})).open


def serve(listen: str, prefill: str, decode: str) -> None:
    """For the main thread of a process: until SIGTERM or SIGINT."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with ThreadPoolExecutor(AT_ONCE) as threads:
        router = BothEngines(threads, prefill, decode)
        server = GenerateServer(listen, router.ask, router.healthy)
        print(f"router at http://{server.address}", flush=True)
        while not stopped.wait(1.0):  # a wait without end would keep Python from running the handlers
            continue
        server.close()


@dataclass(frozen=True, slots=True)
class BothEngines:
    """Asks the engines at ``prefill`` and ``decode``, both HOST:PORT."""

    threads: ThreadPoolExecutor
    prefill: str
    decode: str

    def ask(self, asked: GenerateRequest) -> GenerateAnswer:
        """Decode's answer, or the failure of the side that fails first."""
        asked = msgspec.structs.replace(asked, room=secrets.randbelow(2**62) + 1)
        prefilled, decoded = (self.threads.submit(ask, address, asked) for address in (self.prefill, self.decode))
        wait((prefilled, decoded), return_when=FIRST_COMPLETED)
        if prefilled.done() and prefilled.result().failure:
            return prefilled.result()
        return decoded.result()

    def healthy(self) -> bool:
        """True if both engines say that they serve."""
        return all(is_healthy(each) for each in (self.prefill, self.decode))


def ask(address: str, asked: GenerateRequest) -> GenerateAnswer:
    """An engine's answer; where there is none, that is its failure."""
    request = Request(f"http://{address}/generate", msgspec.json.encode(asked))
    try:
        with _open(request, timeout=ANSWER_SECONDS + HEALTH_SECONDS) as response:
            return answer.decode(response.read())
    except HTTPError as error:
        why = _failure(error.read())
    except URLError as error:
        why = str(error.reason)
    except (OSError, msgspec.DecodeError) as error:
        why = str(error)
    return GenerateAnswer(asked.room, failure=f"{address}: {why}")


def _failure(body: bytes) -> str:
    with suppress(msgspec.DecodeError):
        return answer.decode(body).failure
    return body.decode(errors="replace")


def is_healthy(address: str) -> bool:
    """True if the service at ``address`` says that it serves."""
    try:
        with _open(f"http://{address}/health", timeout=HEALTH_SECONDS):
            return True
    except OSError:
        return False
