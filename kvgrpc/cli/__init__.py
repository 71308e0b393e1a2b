"""The command ``kvgrpc``: start a registry, look at everything, run the demo. It calls ``kvgrpc.client`` only."""
