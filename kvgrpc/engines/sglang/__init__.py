"""SGLang's prefill/decode disaggregation over kvgrpc: an entry point of SGLang's plug-in group. docs/engines/sglang.md.

SGLang loads this module in every process it starts, also where nobody uses kvgrpc: there nothing of ours may end it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

EX_CONFIG = 78
CACHE_LISTEN = "KVGRPC_CACHE_LISTEN"
_ROUTE, _NAME = "KVGRPC_SGLANG", "kvgrpc"


def register() -> None:
    """SGLang's plug-in function: makes the names of kvgrpc known. Whether this SGLang has what they need is looked at
    when somebody asks for one of them.

    Where that fails and somebody asked for kvgrpc, it ends this process with one line that says why: SGLang only logs
    what its plug-ins raise, and would move KV caches over something that nobody asked for. Else it is not in the way.
    """
    try:
        from kvgrpc.engines.sglang.plugin import install

        install(os.environ, sys.argv)
    except BaseException as error:
        why = f"kvgrpc cannot serve this SGLang: {error or type(error).__name__}"
        if is_asked(os.environ, sys.argv):
            print(why, file=sys.stderr, flush=True)
            os._exit(EX_CONFIG)
        logging.getLogger(__name__).info("%s; nobody asks for it", why)


def is_asked(environment: Mapping[str, str], arguments: Sequence[str]) -> bool:
    """True if an operator names kvgrpc: as the transfer backend or the publisher of KV events, or by the address of its
    cache."""
    if environment.get(CACHE_LISTEN) or is_chosen(environment, arguments):
        return True
    return any(f'"{_NAME}"' in text for text in arguments)


def is_chosen(environment: Mapping[str, str], arguments: Sequence[str]) -> bool:
    """True if they choose it as the transfer backend: by the route, or by its name."""
    if environment.get(_ROUTE, "off") != "off":
        return True
    return any(text == _NAME or text.endswith(f"={_NAME}") for text in arguments)
