"""``python -m kvgrpc.demo.processes.main KIND``: one process of the demo, started by the router."""

from __future__ import annotations

import importlib
import sys

from kvgrpc.demo.processes.child import Router

KINDS = {
    "registry": "kvgrpc.demo.processes.registry",
    "prefill": "kvgrpc.demo.processes.prefill",
    "decode": "kvgrpc.demo.processes.decode",
    "decode-2": "kvgrpc.demo.processes.second_decode",
    "reference": "kvgrpc.demo.processes.reference",
}


def main() -> None:
    router = Router()
    from kvgrpc.observability import logging

    logging.configure("WARNING")
    importlib.import_module(KINDS[sys.argv[1]]).main(router)


if __name__ == "__main__":
    main()
