"""``kvgrpc serve``: processes that need no engine of ours."""
