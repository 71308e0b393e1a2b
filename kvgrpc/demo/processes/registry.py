"""The registry process: what ``kvgrpc serve registry`` does, until the router is gone."""

from __future__ import annotations

from kvgrpc.demo.processes.child import Router, RouterGone
from kvgrpc.demo.protocol import Opened
from kvgrpc.server import RegistryServer


def main(router: Router) -> None:
    server = RegistryServer(["127.0.0.1:0"]).open()
    try:
        router.tell(Opened(server.address))
        while True:
            router.receive()
    except RouterGone:
        pass
    finally:
        server.close()
