"""Where the registry keeps its rows."""
