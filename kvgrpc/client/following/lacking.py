"""The engines, single caches of them and addresses that an index does not follow, each with its reason. Pure."""

from __future__ import annotations

from collections.abc import Mapping

# Of an engine or an address as a whole.
WHOLE = -1


class Lacking:
    """Reasons by what they are about: the name of an engine or an address, and there by dp (``WHOLE``: all of it).

    What concerns one engine costs what is known of that one: there may be thousands that serve no events.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[int, str]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def note(self, about: str, why: str, dp: int = WHOLE) -> bool:
        """True if it is news."""
        known = self._known.setdefault(about, {})
        is_news = known.get(dp) != why
        known[dp] = why
        return is_news

    def forget(self, about: str, dp: int = WHOLE) -> None:
        """It is followed."""
        known = self._known.get(about, {})
        known.pop(dp, None)
        if not known:
            self._known.pop(about, None)

    def replace(self, about: str, found: Mapping[int, str]) -> list[int]:
        """Takes all that is known now in the place of what was, and returns of which dp there are news."""
        before = self._known.pop(about, {})
        if found:
            self._known[about] = dict(found)
        return [dp for dp, why in found.items() if before.get(dp) != why]

    def lines(self) -> list[str]:
        """ "ENGINE: why", "ENGINE dp3: why", "ADDRESS: why", in order."""
        known = [(_named(about, dp), why) for about, whys in self._known.items() for dp, why in whys.items()]
        return [f"{what}: {why}" for what, why in sorted(known)]


def _named(about: str, dp: int) -> str:
    return about if dp == WHOLE else f"{about} dp{dp}"
