"""Pure: which bytes of which pages go where."""
