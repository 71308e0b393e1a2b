"""Shared memory of one host as a data plane."""
