"""The variables by which a process sees some of a machine's accelerators. Needs no torch."""

from __future__ import annotations

VARIABLES = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")
"""CUDA's and ROCm's, XPU's, Ascend's."""


def visible_devices(devices: str | None) -> dict[str, str]:
    """The environment in which a process sees these devices alone; None: all that its parent sees.

    >>> visible_devices("0,1")["CUDA_VISIBLE_DEVICES"]
    '0,1'
    """
    return {} if devices is None else dict.fromkeys(VARIABLES, devices)
