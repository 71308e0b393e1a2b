"""Stands in for a package of that name, by which `vllm serve` is hosted on SageMaker: without it no server starts."""
