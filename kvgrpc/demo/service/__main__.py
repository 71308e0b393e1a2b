"""``python -m kvgrpc.demo.service --role prefill|decode|router``: one service, until SIGTERM or Ctrl-C.

An engine's rank has the settings of any other: KVGRPC_LISTEN, KVGRPC_ADVERTISE, KVGRPC_REGISTRY, … A router has none.
"""

from __future__ import annotations

import argparse
import sys

from kvgrpc.demo.service import router
from kvgrpc.errors import KvGrpcError
from kvgrpc.observability import logging


def main() -> int:
    options = argparse.ArgumentParser(prog="kvgrpc.demo.service", description=__doc__)
    what = options.add_mutually_exclusive_group(required=True)
    what.add_argument("--role", choices=["prefill", "decode", "router"])
    what.add_argument("--healthy", metavar="ADDRESS", help="ask GET /health there; exit code 0 if it serves")
    options.add_argument("--listen", default="127.0.0.1:0", help="HTTP, for who asks: POST /generate, GET /health")
    options.add_argument("--prefill", default="127.0.0.1:8100", help="where a router asks the prefill")
    options.add_argument("--decode", default="127.0.0.1:8200", help="where a router asks the decode")
    asked = options.parse_args()
    logging.configure("WARNING")
    if asked.healthy:
        return 0 if router.is_healthy(asked.healthy) else 1
    try:
        if asked.role == "router":
            router.serve(asked.listen, asked.prefill, asked.decode)
        else:
            from kvgrpc.demo.service import engine  # torch

            engine.serve(asked.role, asked.listen)
    except KvGrpcError as error:
        print(f"{error.reason.name}: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
