"""The shell that runs prefetches and backups."""
