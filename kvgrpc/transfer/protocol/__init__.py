"""Pure: the state machines of rooms and sessions, without clock, thread or socket (docs/session.md has the rules)."""
