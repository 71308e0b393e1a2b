"""What each process of the demo does; ``main`` is where all begin."""
