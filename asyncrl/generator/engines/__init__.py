"""Engines: what turns prompts into tokens, behind one protocol."""
