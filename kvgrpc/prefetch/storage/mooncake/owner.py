"""A process that lends memory to a Mooncake Store: ``python -m kvgrpc.prefetch.storage.mooncake.owner --help``.

What it holds is gone with it, and with nothing else: engines come and go beside it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from kvgrpc.dataplane.mooncake.environment import DEFAULTS, for_a_process_of_ours
from kvgrpc.prefetch.storage.mooncake.child import set_up
from kvgrpc.prefetch.storage.mooncake.messages import Start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvgrpc.prefetch.storage.mooncake.owner", description=__doc__)
    parser.add_argument("--master", required=True, metavar="HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1", help="address of this machine at which engines reach it")
    parser.add_argument("--bytes", type=int, required=True, help="memory to lend")
    parser.add_argument("--protocol", choices=["tcp", "rdma"], default="tcp")
    parser.add_argument("--device", default="", help="RDMA devices, with commas")
    parser.add_argument("--until-eof", action="store_true", help="end when stdin does")
    options = parser.parse_args()
    environment = for_a_process_of_ours(os.environ, DEFAULTS)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before the library's threads start
    start = Start(options.host, options.master, options.protocol, options.device, options.bytes, 0, 1)
    try:
        store = set_up(start)
    except (OSError, ImportError) as error:
        sys.exit(f"no memory was lent to {options.master}: {error}")
    print(f"lends {options.bytes} bytes to {options.master}", flush=True)
    if options.until_eof:
        sys.stdin.buffer.read()
    else:
        signal.sigwait(signals)
    store.close()
    os._exit(0)


if __name__ == "__main__":
    main()
