"""``kvgrpc-index``, the index in Rust, as a process of the one that asks it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from kvgrpc.client.aio import Client
from kvgrpc.errors import FeatureDisabled, InvalidRequest, KvGrpcError, PeerUnreachable
from kvgrpc.net import check_target
from kvgrpc.observability.logging import RateLimited
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.within import within

PROGRAM = "kvgrpc-index"
START_SECONDS, END_SECONDS = 20.0, 10.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
# Of ClientSecurity; the program has no option for them.
_NOT_TAKEN = ("cert_file", "key_file", "server_name", "audience")

_log = logging.getLogger(__name__)


def native_index_program() -> str | None:
    """Finds ``kvgrpc-index`` beside this interpreter or on the path; None: it is not installed."""
    return shutil.which(PROGRAM, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


class NativePrefixIndex:
    """``async with NativePrefixIndex(registry="127.0.0.1:8998") as index: await index.client.score(request)``.

    Follows engines as ``PrefixIndex`` does, in a process of its own: neither following nor looking takes this one's
    interpreter. It is asked at ``address``, a socket that this user alone reaches: by ``client``, or by a
    ``SyncClient`` on any thread. Where it dies it is started anew, and goes on from ``saved`` if that names a file.
    It ends when this process does and what it forked meanwhile, however that ends. All methods belong to one event
    loop.

    Raises InvalidRequest for what is no address, and FeatureDisabled for what the program has not: of ``security`` it
    takes ``ca_file``, ``token``, ``token_file`` and ``insecure``.
    """

    def __init__(
        self,
        *,
        registry: str = "",
        sources: Sequence[str] = (),
        security: ClientSecurity | None = None,
        saved: str = "",
    ) -> None:
        for address in filter(None, registry.split(",")):
            check_target(address, "registry")
        for index, source in enumerate(sources):
            check_target(source, f"sources[{index}]")
        if not registry and not sources:
            raise InvalidRequest.of("registry", registry, "the address of a registry, or sources must name ranks")
        self._security = security or ClientSecurity()
        for field in _NOT_TAKEN:
            if getattr(self._security, field):
                raise FeatureDisabled(
                    f"{PROGRAM} dials ranks without {field}: leave it out, or use a PrefixIndex",
                    metadata={"feature": f"security.{field}", "howToEnable": "use a PrefixIndex"},
                )
        self._options = ["--registry", registry, *(word for source in sources for word in ("--source", source))]
        self._options += ["--saved", saved] if saved else []
        self._folder = ""
        self._client: Client | None = None
        self._process: Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._lines = RateLimited(_log, lines=5, seconds=60.0)

    async def __aenter__(self) -> NativePrefixIndex:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """The socket at which it is asked, once it was started."""
        return f"unix:{self._folder}/socket"

    @property
    def client(self) -> Client:
        """Asks it. Raises RuntimeError before ``start``."""
        if self._client is None:
            raise RuntimeError("the index was not started: `async with` it, or await start()")
        return self._client

    @property
    def healthy(self) -> bool:
        """True while the process lives, or is about to be started anew."""
        return self._keeping is not None and not self._keeping.done()

    async def start(self) -> None:
        """Starts the process, and returns once it can be asked.

        Raises FeatureDisabled where it is not installed, and PeerUnreachable where it does not listen within 20 s.
        """
        self._folder = tempfile.mkdtemp(prefix=f"{PROGRAM}-")
        try:
            self._process = await self._run()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._client = Client(self.address)
        self._keeping = background(self._keep(self._process), PROGRAM)

    async def close(self) -> None:
        """Ends the process within 10 s; what it knows is saved before."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        if self._process is not None:
            await _end(self._process)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep(self, process: Process) -> None:
        """Starts it anew whenever it has died."""
        pause, began = FIRST_PAUSE_SECONDS, time.monotonic()
        while True:
            status = await process.wait()
            self._lines.warning("ended", f"{PROGRAM} ended with {status}: it is started anew")
            if time.monotonic() - began > LONGEST_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause, began = min(2 * pause, LONGEST_PAUSE_SECONDS), time.monotonic()
            try:
                self._process = process = await self._run()
            except (KvGrpcError, OSError) as error:
                self._lines.warning("not started", f"{PROGRAM} cannot be started: {error}")

    async def _run(self) -> Process:
        program = native_index_program()
        if program is None:
            raise FeatureDisabled(
                f"{PROGRAM} is not installed: `make native` builds it where cargo is; a PrefixIndex needs nothing",
                metadata={"feature": PROGRAM, "howToEnable": "make native"},
            )
        secret = Path(self._folder, "token")
        if self._security.token:
            _write_secret(secret, self._security.token)
        process = await asyncio.create_subprocess_exec(
            *(program, "--listen", self.address, "--until-eof", *self._options, *self._credentials()),
            stdin=PIPE,
            stdout=PIPE,
            # Its settings are those of this index alone; and Ctrl-C is for whoever asks it.
            env={name: value for name, value in os.environ.items() if not name.startswith("KVGRPC_")},
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            line = await within(START_SECONDS, process.stdout.readline())
        except BaseException as error:
            await _kill(process)
            if isinstance(error, asyncio.TimeoutError):
                text = f"{PROGRAM} does not listen after {START_SECONDS:g} s"
                raise PeerUnreachable(text, metadata={"address": self.address}) from error
            raise
        finally:
            _forget_secret(secret)  # it was read: who kills this process leaves none behind
        if not line:
            status = await process.wait()
            text = f"{PROGRAM} ended with {status} before it listened: its line on stderr says why"
            raise PeerUnreachable(text, metadata={"address": self.address})
        return process

    def _credentials(self) -> list[str]:
        security = self._security
        token_file = f"{self._folder}/token" if security.token else security.token_file
        named = {"--ca-file": security.ca_file, "--token-file": token_file}
        words = [word for option, value in named.items() if value for word in (option, value)]
        return [*words, "--insecure"] if security.insecure else words


def _write_secret(path: Path, secret: str) -> None:
    path.touch(mode=0o600)
    path.write_text(secret)


def _forget_secret(path: Path) -> None:
    path.unlink(missing_ok=True)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.terminate()  # a child that this process forked may keep standard input open
    try:
        await within(END_SECONDS, process.wait())
    except asyncio.TimeoutError:
        await _kill(process)


async def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
