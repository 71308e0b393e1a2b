"""One request's hand-off as a worker follows it: at prefill a sender, at decode a receiver."""

from __future__ import annotations

import time

from kvgrpc.engines.vllm.groups import KV, count_of
from kvgrpc.engines.vllm.handoffs import Pages
from kvgrpc.transfer import Align, KVReceiver, KVSender


class Sending:
    """Prefill: made when vLLM begins to compute the prompt, so that decode finds it."""

    def __init__(self, sender: KVSender, align: Align = Align.TAIL) -> None:
        self.room, self._align = sender, align
        self.pages: Pages = {}
        self.began = 0.0
        self._holds = False

    def send(self, pages: Pages) -> None:
        """All of the prompt, or, with ``Align.TAIL``, what is left of it in each pool: decode wants the last ones. From
        now on vLLM holds them until ``over``."""
        self.pages, self.began, self._holds = pages, time.monotonic(), True
        self.room.init(len(pages[KV]), align=self._align)
        self.room.send(pages)

    @property
    def over(self) -> bool:
        """True if vLLM may have the pages back: it was given them, and nobody reads them any more."""
        return self._holds and self.room.ended and self.room.release_safe


class Receiving:
    """Decode: with ``pages``, vLLM waits for them; without, prefill only hears that it need not."""

    def __init__(self, receiver: KVReceiver, pages: Pages, first_page: int, abort: bool) -> None:
        self.room = receiver
        self.pages = pages
        self.began = time.monotonic()
        self.unwanted = False
        self.told_failure = False
        if abort:
            self.give_up()
        else:
            receiver.init(pages, first_page=first_page)

    @property
    def awaited(self) -> bool:
        """True if vLLM waits for the end."""
        return count_of(self.pages) > 0

    def give_up(self) -> None:
        """The request is over for vLLM. Prefill hears of it once it is known, also where no step follows this one."""
        self.unwanted = True
        self.room.abort("decode gave the request up")

    @property
    def failed(self) -> bool:
        """Just now: vLLM has to be told."""
        return not self.told_failure and not self.unwanted and self.room.failure is not None

    @property
    def over(self) -> bool:
        """True if nobody writes to the pages any more."""
        return self.room.ended and self.room.release_safe
