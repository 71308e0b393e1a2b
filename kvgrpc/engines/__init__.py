"""Adapters that let serving engines use kvgrpc unpatched: one package an engine, none imports another."""
