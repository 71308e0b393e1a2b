"""The pages of prompts that device and host have, and who asks for them."""
