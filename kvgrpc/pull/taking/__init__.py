"""The taker's half of a pull: whom it asks, and where pages land."""
