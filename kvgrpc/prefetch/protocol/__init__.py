"""State machines of a prefetch and a backup, without clock, thread or storage: the rules of docs/prefetch/cases.md."""
