"""KV-cache events: of one rank, and what an index makes of them."""
