"""Bytes that no engine writes, thrown at what reads payloads. ``python -m tests.fuzz`` says how."""
