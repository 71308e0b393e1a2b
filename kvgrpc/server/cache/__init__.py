"""A cache of pages as others see it: asked by routers, lent to other engines, told in events."""
