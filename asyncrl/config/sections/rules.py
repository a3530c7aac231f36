"""How a section refuses a value: by the key, the value, the rule and the remedy."""

from __future__ import annotations

from urllib.parse import urlsplit

from asyncrl.errors import ConfigError

LONGEST_NAME = 128
"""Bytes of a name: a file name holds 255, and some files of a run add to it."""


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


def check_name(key: str, name: str) -> None:
    """A name that becomes a file name, a part of a metric's name, and a word on the command line."""
    fits = bool(name) and name.isprintable() and name == name.strip() and len(name.encode()) <= LONGEST_NAME
    require(
        fits and not set("/\\") & set(name) and name[0] not in ".-",
        key,
        name,
        f"must be a plain name of at most {LONGEST_NAME} bytes, without / and \\, not beginning with . or -",
        "use letters, digits, - and _",
    )


def check_devices(key: str, devices: str | None) -> None:
    """CUDA_VISIBLE_DEVICES of a pool, as CUDA reads it; it takes a word that it does not know for no GPU at all."""
    names = () if not devices else tuple(name.strip() for name in devices.split(","))
    require(
        all(name.isdecimal() or name.startswith(("GPU-", "MIG-")) for name in names),
        key,
        devices,
        "names GPUs by their numbers (0,1), or by GPU-… or MIG-…",
        f"set {key}=0,1, or leave it out for the GPUs that the shell has",
    )
    require(
        len(set(names)) == len(names), key, devices, "names a GPU twice", f"name each once, e.g. {key}=0,1"
    )


def check_redis_url(key: str, url: str | None) -> None:
    """A URL as redis-py reads it, apart from the server's being there."""
    if url is None:
        return
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("redis", "rediss", "unix") and (parts.port is None or bool(parts.hostname))
    except ValueError:  # a port that is no number: its text may be a part of the password
        fits = False
    require(
        fits,
        key,
        url,
        "is no URL of a Redis server: redis://, rediss:// (TLS) or unix://",
        f"write e.g. {key}=redis://127.0.0.1:6379/0; in a password write %2F for /, %40 for @ and %3A for :",
    )
