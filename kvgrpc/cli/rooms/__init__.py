"""Hand-offs: tables of rooms and sessions, and the story of one room."""
