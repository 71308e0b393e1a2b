"""One numbering of one cache's events: what is queued, kept, and folded into the present state."""
