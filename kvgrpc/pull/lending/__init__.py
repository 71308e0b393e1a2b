"""The holder's half of a pull: what it says that it has, and what it lends."""
