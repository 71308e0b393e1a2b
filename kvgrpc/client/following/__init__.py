"""Followers over the network, and the index over many: what runs ``kvgrpc.events.following``, which is pure."""
