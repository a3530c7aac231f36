"""python -m bench.sync: see the package."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.bars import Measured, figures
from bench.output import bench_parser, machine, write_results
from bench.sync.fewer_bytes import delta_bytes
from bench.sync.model import SHAPES, total_bytes
from bench.sync.planning import plan_671b_s
from bench.sync.report import BARS, table
from bench.sync.runner import BACKENDS, Others, Ours, memcpy_gb_per_s

SLOW_S = 3.0
"""What a version takes over the slowed link."""

OTHERS = {
    "raw_gloo": ("raw", 1),
    "gloo_per_tensor": ("per_tensor", 2),
    "gloo_per_tensor_1": ("per_tensor", 1),
    "gloo_packed": ("packed", 1),
    "shm_file": ("shm_file", 1),
}


def main() -> None:
    args = _parser().parse_args()
    sizes = {
        millions: figures(_repetitions(millions, args.repetitions), BARS) for millions in args.parameters
    }
    # Bars are looked at with the most parameters that their figures are measured with.
    found = {name: value for millions in sorted(sizes) for name, value in sizes[millions].items()}
    found["plan_671b_s"] = plan_671b_s()
    text = table(found, sizes, machine(), args.repetitions)
    print(text)
    measured = {"figures": found, "machine": machine(), "by_million_parameters": sizes}
    write_results(args.json, measured, args.table, text)


def _repetitions(millions: int, count: int) -> list[Measured]:
    """The first round of everything warms up and is not kept."""
    with tempfile.TemporaryDirectory(prefix="sync-") as folder, ExitStack() as stack:
        others, ours = Others(millions, Path(folder), stack), Ours(millions, Path(folder), stack)
        measured = [_repetition(millions, others, ours) for _ in range(count + 1)][1:]
        return [found | _once(millions, ours) for found in measured]


def _once(millions: int, ours: Ours) -> dict[str, float]:
    return {
        **ours.pauses("generator_pause", None),
        **ours.pauses("generator_pause_slow_link", total_bytes(millions) / SLOW_S),
        **{f"delta_bytes_ratio.{kind}": share for kind, share in delta_bytes(millions).items()},
    }


def _repetition(millions: int, others: Others, ours: Ours) -> dict[str, float]:
    found: dict[str, Any] = {"gb_per_s.memcpy": memcpy_gb_per_s(millions)}
    for name, (method, sinks) in OTHERS.items():
        found[f"gb_per_s.{name}"] = others.gb_per_s(method, sinks)
    for backend in reversed(ours.backends):  # the fastest last: its details stay
        for world in (1, 2):
            measured = ours.round(backend, world)
            name = f"asyncrl_tp{world}" + ("" if backend == BACKENDS[0] else f"_{backend}")
            found[f"gb_per_s.{name}"] = measured.pop("gb_per_s")
            if world == 1:
                found |= measured
    print("  ".join(f"{name} {value:,.3g}" for name, value in found.items()), flush=True)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("sync", "The weight stream beside other ways.")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--parameters",
        type=int,
        nargs="+",
        default=[100, 500],
        choices=list(SHAPES),
        help="millions (default: both)",
    )
    return parser


if __name__ == "__main__":
    main()
