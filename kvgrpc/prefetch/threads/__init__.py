"""The pool of threads and the timers of the cache."""
