"""Servers without a rank: a registry, an index, an engine's events."""
