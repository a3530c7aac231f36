"""Counter-based uniform numbers: a hash of what is drawn for, never a state that runs on.

    uniform(seed, ordinal, sample, position)

The same counters give the same number on any machine, in any batch, in any order.
"""

from __future__ import annotations

import numpy as np

from asyncrl.types import Array

# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_key(*counters: int | Array) -> Array:
    """uint64: everything of the counter but its last part. Arguments broadcast."""
    key = _mix(_uint64(counters[0]))
    for counter in counters[1:]:
        key = _mix(key ^ _uint64(counter))
    return key


def uniform_at(key: Array, position: int | Array) -> Array:
    """float64 strictly inside (0, 1) for the last part of the counter; broadcasts with `key`."""
    bits = _mix(key ^ _uint64(position)) >> np.uint64(12)
    # 52 bits and a half: never 0, and u times a total never rounds up to that total.
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def uniform(*counters: int | Array) -> Array:
    """float64 strictly inside (0, 1), one for each combination of counters; arguments broadcast."""
    return uniform_at(stream_key(*counters[:-1]), counters[-1])


def _uint64(value: int | Array) -> Array:
    if isinstance(value, int):
        return np.array(value & 0xFFFF_FFFF_FFFF_FFFF, np.uint64)
    return np.asarray(value).astype(np.uint64)


def _mix(x: Array) -> Array:
    """The finaliser of splitmix64, one golden step on: a bijection of uint64."""
    with np.errstate(over="ignore"):
        x = x + GOLDEN
        x = (x ^ (x >> np.uint64(30))) * MIX_1
        x = (x ^ (x >> np.uint64(27))) * MIX_2
        return x ^ (x >> np.uint64(31))
