"""Pages in caches: tiers, prefetches, pulls."""
