"""What somebody does first with an installed kvgrpc; .ci/release-check runs it where nothing else is installed."""

import subprocess

import kvgrpc
from kvgrpc.client import SyncClient
from kvgrpc.server import RegistryServer

said = subprocess.run(["kvgrpc", "--version"], capture_output=True, text=True, check=True).stdout
assert kvgrpc.__version__ in said, said
registry = RegistryServer(["127.0.0.1:0"]).open()
with SyncClient(registry.address) as client:
    assert client.get_server_info().version == kvgrpc.__version__
shown = subprocess.run(["kvgrpc", "engines", "-s", registry.address], capture_output=True, text=True, check=True).stdout
assert "none is registered" in shown, shown
registry.close()
