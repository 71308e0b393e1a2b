"""The code of each process of the demo; all begin at ``main``."""
