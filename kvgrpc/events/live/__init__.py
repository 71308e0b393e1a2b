"""What is sent as it happens: ZMQ PUB, and the engines' own replay over ZMQ ROUTER."""
