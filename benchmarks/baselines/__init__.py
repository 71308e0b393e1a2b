"""What kvgrpc is compared with: the seeds' protocol, and the raw ceiling of the data planes.

The seeds' protocol is written anew from its observed behaviour, as fast as its design allows, and without the faults
that would make it stop: see the heads of ``disaggregation`` and ``events``.
"""
