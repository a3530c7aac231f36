"""Generators: engines that make tokens, and the worker that turns tasks into scored groups with them."""
