"""The layers around every call of a server, in one fixed order:

telemetry > errors > auth > admission > deadline > the servicer

Telemetry sees the final status; errors turns every exception below it into a status, and nothing else calls abort; auth
comes before anything could tell whether something exists; admission counts only who may call; the deadline holds for
the servicer's own work. Each wraps the call, never a message: a frame of a session passes through nothing of this.
"""

from kvgrpc.rpc.interceptors.admission import Admission, CallLimits, OpenCalls
from kvgrpc.rpc.interceptors.chain import interceptors_of
from kvgrpc.rpc.methods import ALLOWED

__all__ = ["ALLOWED", "Admission", "CallLimits", "OpenCalls", "interceptors_of"]
