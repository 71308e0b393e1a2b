"""Pulls: finished pages of another engine's host cache, taken instead of computed. README.md says how it fits."""
