"""Decisions that the ranks of one replica make together: votes (pure), over gRPC or torch.distributed."""
