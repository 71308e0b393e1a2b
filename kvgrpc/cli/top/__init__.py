"""``kvgrpc top``: all ranks of a registry in the terminal, live."""
