"""The reading side: the exact contents of a cache, and of many together."""
