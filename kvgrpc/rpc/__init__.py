"""What every gRPC client and server here shares: the loop thread, channels, security, statuses, interceptors, retry."""
