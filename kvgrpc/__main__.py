"""``python -m kvgrpc`` is the command ``kvgrpc``."""

from kvgrpc.cli.main import main

main()
