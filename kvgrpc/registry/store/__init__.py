"""The places where a registry keeps its rows."""
