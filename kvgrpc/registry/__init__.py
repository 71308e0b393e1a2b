"""Who serves what: engines, their ranks, shapes, leases and epochs."""
