"""The rows of docs/performance.md, one module for each family."""
