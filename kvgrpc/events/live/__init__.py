"""Events sent as they happen: ZMQ PUB, and the engines' own replay over ZMQ ROUTER."""
