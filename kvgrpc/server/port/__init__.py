"""One port, as every server has it: bound, healthy, reflected, drained; ServerService, and who calls."""
