"""The caller of the call that runs now, and the ranks for which it may speak."""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from kvgrpc.errors import IdentityMismatch, InvalidRequest
from kvgrpc.model import RankRef, Role
from kvgrpc.net import caller_address, is_unix, split
from kvgrpc.rpc.security import CallerRole, Token

MAX_CLOCK_SKEW_SECONDS = 600.0

_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
_RANK_NAME = re.compile(r"(?:.*/)?(?P<engine>[^/]+)[./](?P<role>prefill|decode)[./]rank")


@dataclass(frozen=True, slots=True)
class Caller:
    """``name``: what its limits are counted by; the name of its token or certificate, else the host of its address.

    ``role``: None where nobody has to prove anything. ``engines`` (a pattern as of file names) and ``engine_role``: the
    only ranks that it may speak for; empty and None: any.
    """

    name: str
    role: CallerRole | None = None
    engines: str = ""
    engine_role: Role | None = None

    def speaks_for(self, ref: RankRef, role: Role | None) -> bool:
        """True if that rank may be this caller. ``role``: None if unknown."""
        matches = not self.engines or fnmatch.fnmatchcase(ref.rank.engine, self.engines)
        return matches and (role is None or self.engine_role in (None, role))

    @classmethod
    def with_token(cls, token: Token, host: str) -> Caller:
        name = f"{token.role.value} {token.name}" if token.name else host
        engines = token.name if token.role is CallerRole.RANK else ""
        return cls(name, token.role, engines, _ROLES.get(token.engine_role))

    @classmethod
    def with_certificate(cls, names: Iterable[str]) -> Caller | None:
        """By the first of its names that gives a role; None: none does.

        A name gives the role that it ends in, after a dot or a slash or as a whole: "prefill-7.rank",
        "spiffe://cluster/kvgrpc/consumer", "operator". "ENGINE.prefill.rank" (or with slashes) speaks for the prefill
        ranks of that engine only.
        """
        for name in names:
            last = name.replace("/", ".").rpartition(".")[2]
            if last in CallerRole._value2member_map_:
                scope = _RANK_NAME.fullmatch(name)
                if scope is None:
                    return cls(f"certificate {name}", CallerRole(last))
                # As it stands: no character of a certificate's name is a pattern.
                return cls(f"certificate {name}", CallerRole.RANK, glob_escape(scope["engine"]), _ROLES[scope["role"]])
        return None


class Who(NamedTuple):
    """A caller as it calls from one host."""

    name: str
    host: str
    role: CallerRole | None


@dataclass(frozen=True, slots=True)
class NewsReader:
    """Somebody who follows this process by a stream of ``method`` ("/package.Service/Method"), since so many Unix
    seconds. ``behind``: what there is and was not sent to it yet; None: it is about to hear everything, or takes none.
    """

    who: Who
    method: str
    since: float
    behind: int | None
    engine: str = ""
    dp: int = 0


CALLER: ContextVar[Caller] = ContextVar("kvgrpc-caller")
# ``ServicerContext.peer()`` of the call that runs now.
PEER: ContextVar[str] = ContextVar("kvgrpc-peer")


def caller() -> Caller:
    """Of the call that runs now; outside of one, somebody with every right."""
    return CALLER.get(_NOBODY)


def origin() -> tuple[str, str]:
    """The host and the connection that the call came by that runs now; both empty outside of one."""
    address = caller_address(PEER.get(""))
    return (address if is_unix(address) or not address else split(address)[0]), address


def who() -> Who:
    """The caller and the host of the call that runs now."""
    known = caller()
    return Who(known.name, origin()[0], known.role)


def check_speaker(ref: RankRef, role: Role | None, field: str) -> None:
    """Checks what somebody says who speaks for a rank, at ``field`` of the request. ``role``: None where any will do.

    Raises IdentityMismatch where the caller's token or certificate is another rank's, InvalidRequest for an epoch more
    than ten minutes ahead of our clock: it would fence every later incarnation.
    """
    check_scope(ref, role, field)
    ahead = ref.epoch / 1e6 - time.time()
    if ahead > MAX_CLOCK_SKEW_SECONDS:
        rule = f"at most {MAX_CLOCK_SKEW_SECONDS / 60:g} minutes ahead of this host's clock (Unix microseconds)"
        raise InvalidRequest.of(f"{field}.epoch", ref.epoch, rule)


def check_scope(ref: RankRef, role: Role | None, field: str) -> None:
    """Raises IdentityMismatch where the caller's token or certificate is another rank's. ``role``: None if unknown."""
    known, engine = caller(), ref.rank.engine
    if not known.speaks_for(ref, role):
        wanted = "" if known.engine_role is None else f", {known.engine_role.name.lower()} only"
        scope = f"{known.engines or '*'}{wanted}"
        what = "" if role is None else f"{role.name.lower()} of "
        raise IdentityMismatch(
            f"{field}: {known.name} may speak for {scope}, not for {what}{engine}",
            metadata={"rank": ref.rank, "caller": known.name, "scope": scope},
        )


def glob_escape(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


_NOBODY = Caller("")
