"""Storage in a Mooncake Store: a master that knows where objects are, and owners that lend their memory to it."""
