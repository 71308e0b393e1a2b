"""One rank: opened out of the capabilities, watched, and closed."""
