"""kvgrpc and the seeds' protocol behind one face, so that both are driven by the same lines."""
