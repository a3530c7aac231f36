"""How a section refuses a value: by the key, the value, the rule and the remedy."""

from __future__ import annotations

from asyncrl.errors import ConfigError


def require(ok: bool, key: str, value: object, rule: str, remedy: str) -> None:
    """Raise `ConfigError` unless `ok`."""
    if not ok:
        raise ConfigError(key, value, rule, remedy)


def positive(section: str, **values: float) -> None:
    """Each value must be above 0; the error names the key and a value that would do."""
    for key, value in values.items():
        require(value > 0, f"{section}.{key}", value, "must be above 0", f"set {section}.{key}=1 or more")


def at_least_0(section: str, **values: float) -> None:
    """Each value must be 0 or more."""
    for key, value in values.items():
        require(value >= 0, f"{section}.{key}", value, "cannot be negative", f"set {section}.{key}=0")
