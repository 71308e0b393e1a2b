"""PrefetchService over the prefix tree of a real SGLang engine. docs/engines/sglang.md, section Prefetch."""
