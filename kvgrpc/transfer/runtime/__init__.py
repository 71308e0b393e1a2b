"""The shell of the protocol: managers, sessions over gRPC, and the thread that moves bytes."""
