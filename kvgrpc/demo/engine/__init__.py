"""One engine of the demo: a Llama over paged memory with a prefix cache."""
