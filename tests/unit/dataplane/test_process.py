"""A process is told from a later one with the same pid."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec

from kvgrpc.dataplane.shm.process import ProcessIdentity, own_identity, socket_inodes, start_of


def test_this_process_is_visible_and_alive() -> None:
    me = own_identity()
    assert (me.pid, me.visible, me.alive) == (os.getpid(), True, True)
    assert msgspec.json.decode(msgspec.json.encode(me), type=ProcessIdentity) == me


def test_a_recycled_pid_is_another_process() -> None:
    assert not msgspec.structs.replace(own_identity(), start=own_identity().start - 1).alive


def test_a_zombie_and_an_ended_process_are_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = start_of(child.pid)
    assert start is not None
    identity = msgspec.structs.replace(own_identity(), pid=child.pid, start=start)
    assert identity.alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.alive, "a zombie writes nothing"
    child.communicate()
    assert not identity.alive
    assert socket_inodes(child.pid) == frozenset()


def test_sockets_of_a_process_are_found_by_inode() -> None:
    with socket.socket() as one:
        assert os.fstat(one.fileno()).st_ino in (socket_inodes(os.getpid()) or ())
