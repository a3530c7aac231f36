"""The configuration of a run: its sections, how it is read, and what is checked before any process starts."""

VERSION = "0.1.0"
"""The package's version, equal to that of pyproject.toml; a checkout need not be installed for it."""
