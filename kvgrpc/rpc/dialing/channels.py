"""One channel per address, for calls that come and go."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Container

import grpc

from kvgrpc.rpc.dialing.channel import retire

MAX_CHANNELS = 256
# Until then a channel's own backoff is below half a second, too.
_YOUNG_SECONDS = 0.5


class ChannelPool:
    """Opens a channel when an address is first asked for. Bounded by ``trim``. All methods belong to one event loop."""

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._open_channel = open_channel
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._opened: dict[str, float] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open_channel(address)
            self._opened[address] = time.monotonic()
        self._channels.move_to_end(address)
        return channel

    def trim(self, in_use: Container[str]) -> None:
        """Closes the least used channel that is not in use, where there are more than MAX_CHANNELS."""
        if len(self._channels) > MAX_CHANNELS:
            idle = next((address for address in self._channels if address not in in_use), None)
            if idle is not None:
                self.hang_up(idle)

    def redial(self, address: str) -> None:
        """The next call dials anew: it must not inherit how long a channel waits between its own attempts. Twice a
        second at most, however many calls fail."""
        if time.monotonic() - self._opened.get(address, 0.0) >= _YOUNG_SECONDS:
            self.hang_up(address)

    def hang_up(self, address: str) -> None:
        """Closes the channel, but calls that are under way go on."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            del self._opened[address]
            retire(channel)

    def is_connected(self, address: str) -> bool:
        channel = self._channels.get(address)
        return channel is not None and channel.get_state() == grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), OrderedDict()
        for channel in channels:
            await channel.close()
