"""`make bench`: every row of docs/performance.md, ours beside its baseline in the same run.

``python -m benchmarks [--only control,events] [--rounds N] [--json PATH]``. ``baselines`` holds what we compare with,
``sides`` gives both the same face, ``rows`` the work, ``harness`` the processes, rounds and tables.
"""
