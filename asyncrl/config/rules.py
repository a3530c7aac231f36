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


def positive_if_set(section: str, **values: float | None) -> None:
    """Each value must be above 0, or none."""
    positive(section, **{key: value for key, value in values.items() if value is not None})


def check_support(section: str, top_p: float, top_k: int, min_p: float) -> None:
    """What truncates a sampling distribution must leave at least one token."""
    require(
        0 < top_p <= 1,
        f"{section}.top_p",
        top_p,
        "is the mass of the tokens to draw from, above 0 and at most 1",
        f"set {section}.top_p=1.0 for all of them",
    )
    require(
        0 <= min_p < 1,
        f"{section}.min_p",
        min_p,
        "is a share of the likeliest token's probability, below 1",
        f"set {section}.min_p=0 for all tokens",
    )
    at_least_0(section, top_k=top_k)
