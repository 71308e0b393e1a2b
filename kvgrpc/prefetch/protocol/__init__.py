"""What a prefetch and a backup are, without clock, thread or storage: the rules of docs/prefetch/cases.md."""
