"""The base of every gRPC client and server: the loop thread, channels, security, statuses, interceptors, retry."""
