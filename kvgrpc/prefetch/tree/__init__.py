"""Which pages of which prompts device and host have, and who asks for them."""
