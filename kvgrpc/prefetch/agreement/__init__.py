"""What the ranks of one replica decide together: votes (pure), over gRPC or torch.distributed."""
