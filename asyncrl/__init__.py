"""Fully asynchronous, off-policy, streaming reinforcement learning for language models."""
