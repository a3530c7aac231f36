"""The picture of `asyncrl bench utilization`: what each pool does with its time, in each mode."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.telemetry.spans import OTHER, WAIT

WORK_COLOURS = ("#2b8a3e", "#69db7c", "#b2f2bb", "#087f5b")
WAIT_COLOURS = ("#c92a2a", "#ff8787", "#f08c00", "#ffd43b", "#868e96", "#ced4da")


def draw(report: Mapping[str, Any], path: Path) -> None:
    """One bar per mode and pool, stacked by span; the throughput beside it.

    Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot", str(path), "needs matplotlib", "pip install 'asyncrl[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 4.2))
    bars = [(mode, pool) for mode in reversed(report["modes"]) for pool in ("learner", "generator")]
    colours: dict[str, str] = {}
    for y, (mode, pool) in enumerate(bars):
        left = 0.0
        for name, share in sorted(report["modes"][mode]["shares"][pool].items(), key=_work_first):
            label = None if name in colours else name
            colour = colours.setdefault(name, _colour(name, colours))
            axes.barh(y, share, left=left, color=colour, label=label, height=0.8)
            left += share
    labels = [f"{mode}: {pool}" for mode, pool in bars]
    axes.set_yticks(range(len(bars)), labels)
    for y, (mode, pool) in enumerate(bars):
        if pool == "generator":
            axes.text(1.01, y - 0.5, f"{report['modes'][mode]['rollouts_per_s']:.0f} rollouts/s", va="center")
    axes.set(xlim=(0, 1), xlabel="share of the time")
    axes.legend(bbox_to_anchor=(0.5, -0.15), loc="upper center", ncols=4, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)


def _is_wait(name: str) -> bool:
    return name.startswith(WAIT) or name == OTHER


def _work_first(item: tuple[str, float]) -> tuple[bool, str]:
    return _is_wait(item[0]), item[0]


def _colour(name: str, taken: Mapping[str, str]) -> str:
    palette = WAIT_COLOURS if _is_wait(name) else WORK_COLOURS
    used = sum(_is_wait(other) == _is_wait(name) for other in taken)
    return palette[used % len(palette)]
