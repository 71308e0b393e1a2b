"""The router's ends of the pipes to the demo's processes."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from kvgrpc.demo import launch
from kvgrpc.demo.launch import DemoFailed, Processes
from kvgrpc.demo.protocol import Close, Offload

LONGER_THAN_A_PIPE = Offload(prompt=list(range(100_000)))


def test_a_process_that_takes_no_message_is_killed_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "TELL_SECONDS", 0.2, raising=False)
    with Processes(["registry"]) as processes:
        child = processes._children["registry"]._popen
        os.kill(child.pid, signal.SIGSTOP)
        telling = threading.Thread(target=processes.tell, args=("registry", LONGER_THAN_A_PIPE), daemon=True)
        telling.start()
        telling.join(20.0)
        held = telling.is_alive()
        if held:
            child.kill()
        assert not held, "the router waits for ever"
        with pytest.raises(DemoFailed, match=r"took no message for 0\.2 s"):
            while processes.receive(time.monotonic() + 20.0):
                pass


def test_a_message_that_is_longer_than_a_pipe_arrives() -> None:
    """A registry passes it over, and hears what comes behind it."""
    with Processes(["registry"]) as processes:
        processes.tell("registry", LONGER_THAN_A_PIPE)
        processes.tell("registry", Close())
        with pytest.raises(DemoFailed, match=r"exit code 0\)"):
            while processes.receive(time.monotonic() + 20.0):
                pass
