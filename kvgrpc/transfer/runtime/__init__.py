"""What runs the protocol: managers, sessions over gRPC, and the thread that moves bytes."""
