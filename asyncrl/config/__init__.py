"""The configuration of a run: its sections, how it is read, and what is checked before any process starts."""

VERSION = "0.1.0"
"""Of the package, as pyproject.toml has it; a checkout that is not installed knows it too."""
