"""SGLang's prefill/decode disaggregation over kvgrpc: an entry point of SGLang's plug-in group. docs/engines/sglang.md.

SGLang loads this module in every process it starts and only logs what goes wrong there, so nothing heavy is imported
until ``register`` runs, and ``register`` ends the process where it cannot do its work.
"""

from __future__ import annotations

import os
import sys

EX_CONFIG = 78


def register() -> None:
    """SGLang's plug-in function: makes the transfer backend known, or ends this process with one line that says why.

    An SGLang that goes on without its plug-in would move KV caches over something that nobody asked for.
    """
    try:
        from kvgrpc.engines.sglang.plugin import install

        install(os.environ)
    except BaseException as error:
        print(f"kvgrpc cannot serve this SGLang: {error or type(error).__name__}", file=sys.stderr, flush=True)
        os._exit(EX_CONFIG)
