"""Registered engines and ranks: one process by itself, and all of a registry side by side."""
