"""Prefill's half of a session. Pure: ``core.py`` has the rules, the others its rooms, pairs, owners and memory."""
