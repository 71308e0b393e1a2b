"""``python -m kvgrpc.demo.process KIND``: one process of the demo, started by the router."""

from __future__ import annotations

import importlib
import sys

from kvgrpc.demo.child import Router

KINDS = {
    "registry": "kvgrpc.demo.registry_process",
    "prefill": "kvgrpc.demo.prefill_process",
    "decode": "kvgrpc.demo.decode_process",
    "reference": "kvgrpc.demo.reference_process",
}


def main() -> None:
    router = Router()
    from kvgrpc.observability import logging

    logging.configure("WARNING")
    importlib.import_module(KINDS[sys.argv[1]]).main(router)


if __name__ == "__main__":
    main()
