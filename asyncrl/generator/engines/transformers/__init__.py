"""The embedded engine: a transformers model with a static KV cache and continuous batching."""
