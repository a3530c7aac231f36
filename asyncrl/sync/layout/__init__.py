"""Layouts: which rank holds which box of which parameter, in checkpoint names and coordinates."""
