"""Orders for vLLM's offloading tiers: what kvgrpc.engines.vllm.orders is made of."""
