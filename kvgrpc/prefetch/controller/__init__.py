"""Prefetches and backups: operations, the threads that run them, and who owns their pages meanwhile."""
