"""``kvgrpc view``: the fleet of a registry as a page in the browser. Read-only, one process over the public client."""
