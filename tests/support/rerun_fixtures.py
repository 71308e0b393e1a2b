"""A plugin of pytest: fixtures of a module that are made when a test is run again end with the module.

pytest-rerunfailures (16.7) puts away what is to be torn down with a module before it runs a test again, and takes that
back in the place of what the rerun noted. Where a module's first test failed while its first fixture was made, each
fixture behind that one is made in the rerun, is never torn down, and is there for the modules that follow: a rank that
serves on, with its rooms and its metrics.
"""

from __future__ import annotations

import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Before the plugin takes back what it put away."""
    put_away = getattr(sys.modules.get("pytest_rerunfailures"), "suspended_finalizers", {})
    stack = item.session._setupstate.stack
    for node, (finalizers, _) in put_away.items():
        noted = stack[node][0] if node in stack else finalizers
        if noted is not finalizers:
            finalizers += noted[1:]  # the first is the node's own
