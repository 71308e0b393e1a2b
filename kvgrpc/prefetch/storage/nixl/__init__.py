"""Storage in files, moved by NIXL's plug-in POSIX."""
