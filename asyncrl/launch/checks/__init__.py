"""Checks before any process starts."""
