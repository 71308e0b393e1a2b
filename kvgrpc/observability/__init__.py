"""The figures that operators see of a process: metrics and logs, their names and labels in one place."""
