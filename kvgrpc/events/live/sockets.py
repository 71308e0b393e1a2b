"""Opening and closing ZMQ sockets."""

from __future__ import annotations

import errno
import itertools
import logging

import zmq

from kvgrpc.events.endpoints import LARGEST_QUESTION, Endpoint, is_open_to_others

# zmq lingers for this part of a deadline, and reports a little later.
LINGER_SHARE = 0.9
GRACE_SECONDS = 0.5

_monitors = itertools.count()
_unstopped: list[zmq.Socket[bytes]] = []
_log = logging.getLogger(__name__)


def open_socket(kind: int, endpoint: Endpoint, hwm: int, monitored: int = 0) -> zmq.Socket[bytes]:
    """A socket of the shared context that sends at most ``hwm`` messages ahead (0: any number), bound or connected.
    Its monitor hears of the events ``monitored`` from the beginning on.

    Raises OSError when that is not possible. Warns of an endpoint that others than this host reach: ZMQ asks nobody who
    they are.
    """
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set(zmq.SNDHWM, hwm)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, LARGEST_QUESTION)
    socket.set(zmq.IPV6, int(endpoint.ipv6))
    if monitored:
        # Not pyzmq's name for it, which close_delivered takes, and which is free again only some time after.
        socket.get_monitor_socket(monitored, f"inproc://kvgrpc-monitor-{next(_monitors)}")
    try:
        if endpoint.bind:
            socket.bind(endpoint.address)
        else:
            socket.connect(endpoint.address)
    except zmq.ZMQError as error:
        if monitored:
            end_monitor(socket)
        socket.close()
        raise OSError(error.errno or errno.EINVAL, error.strerror, endpoint.address) from None
    if endpoint.bind and is_open_to_others(endpoint.address):
        _log.warning(
            "events: %s is bound for other hosts, and ZMQ authenticates nobody: whoever reaches it reads token ids; "
            "bind 127.0.0.1, or keep strangers out by the network",
            bound_address(socket),
        )
    return socket


def end_monitor(socket: zmq.Socket[bytes]) -> None:
    """In the order that holds up no other socket of the process."""
    monitor = socket.get_monitor_socket()
    socket.disable_monitor()
    monitor.close(linger=0)


def bound_address(socket: zmq.Socket[bytes]) -> str:
    """The address that it is bound to, with the port that it got."""
    address = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.decode().rstrip("\0")


def close_delivered(socket: zmq.Socket[bytes], deadline: float) -> None:
    """Closes it when its peers have what was sent, or after ``deadline`` seconds; what is left is dropped."""
    # A closed socket lives on until it has delivered, and says then that its monitor stops.
    monitor = socket.get_monitor_socket(zmq.EVENT_MONITOR_STOPPED)
    socket.close(linger=round(deadline * LINGER_SHARE * 1000))
    if monitor.poll(round((deadline + GRACE_SECONDS) * 1000)):
        monitor.close(linger=0)
    else:
        # Closing it first would block zmq's reaper thread, and with it every socket of the process, for good.
        _unstopped.append(monitor)
