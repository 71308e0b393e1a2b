"""``kvgrpc doctor``: this machine, the engine that is installed here, the ranks of a fleet."""
