"""The transfer thread: in whose turn it writes, slices gathered first where that is quicker, and sums of pages."""
