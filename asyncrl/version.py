"""The version of the package, as pyproject.toml has it; a checkout that is not installed knows it too."""

VERSION = "0.1.0"
