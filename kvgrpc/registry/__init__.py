"""The registry: engines, their ranks, shapes, leases and epochs."""
