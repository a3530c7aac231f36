"""Engines behind HTTP: vLLM and SGLang servers that a user started."""
