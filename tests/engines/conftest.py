"""These tests drive real engines: `make test-engines`, in an environment of its own. `make test` passes them by."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("sglang") else ["test_sglang*.py"]
