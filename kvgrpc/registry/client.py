"""The registry as its clients see it; none of it needs the server side."""

from kvgrpc.registry.registration import Registration
from kvgrpc.registry.resolver import Resolver

__all__ = ["Registration", "Resolver"]
