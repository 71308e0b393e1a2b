"""How rows are measured: processes, rounds, and what is printed."""
