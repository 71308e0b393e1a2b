"""Copies between device and host: whole pages down, layer by layer up."""
