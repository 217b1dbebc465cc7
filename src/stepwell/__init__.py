"""Keep the KV cache of an LLM server in four tiers."""
