"""A rank's side of the registry: keeping its rows there, and finding other ranks."""
