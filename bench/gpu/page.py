"""The command line of the checks, and the page that they make."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import torch

from asyncrl.device import accelerator
from bench.bars import row
from bench.gpu.checks import CHECKS, Check, NotHereError, Place
from bench.output import bench_parser, machine, write_results
from bench.process import ROOT

Result = tuple[str, dict[str, float], float]
"""The verdict, the figures, and the seconds that the check took."""


def main() -> int:
    args = _parser().parse_args()
    if args.device == "auto" and not accelerator.count():
        sys.exit(
            "python -m bench.gpu: torch finds no accelerator here; --device cpu --tiny tries the checks without"
        )
    device = accelerator.kind() if args.device == "auto" else args.device
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        place = Place(Path(folder), device, args.tiny)
        results = {name: _checked(name, CHECKS[name], place) for name in args.only or CHECKS}
    title = "CPU" if device == "cpu" else accelerator.name(torch.device(device, 0))
    text = table(title, results)
    print(text)
    default = ROOT / "bench" / "results" / f"gpu_{re.sub('[^a-z0-9]+', '_', title.lower())}.md"
    measured = {"device": title, "results": {name: list(result) for name, result in results.items()}}
    write_results(args.json, measured, args.table or (None if args.tiny or args.only else default), text)
    return int(any(verdict.startswith("FAIL") for verdict, _, _ in results.values()))


def _checked(name: str, check: Check, place: Place) -> Result:
    begun, found = time.monotonic(), {}
    try:
        found = check(place)
        verdict = "pass"
    except NotHereError as reason:
        verdict = f"skipped: {reason}"
    except Exception as error:  # the others still run
        if os.environ.get("CI") or place.tiny:
            raise
        verdict = f"FAIL: {type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    print(f"{name:12} {seconds:6.1f} s  {verdict}", flush=True)
    return verdict, found, seconds


def table(title: str, results: dict[str, Result]) -> str:
    """Markdown. title: the device's name · results: by the names of checks"""
    lines = [f"# asyncrl on {title}", "", f"`make gpu-check`, torch {torch.__version__}. {machine()}", ""]
    lines += [row(["check", "what it does", "verdict", "figures", "s"]), row(["---"] * 4 + ["--:"])]
    for name, (verdict, found, seconds) in results.items():
        figures = ", ".join(f"{key} {value:,.4g}" for key, value in found.items())
        about = str(CHECKS[name].__doc__).splitlines()[0]
        lines.append(row([name, about, " ".join(verdict.split())[:400], figures, f"{seconds:.0f}"]))
    return "\n".join([*lines, ""])


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("gpu", "Does asyncrl work on this machine's GPUs.")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="small models; the first failure ends it")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), help="some checks; writes no page")
    return parser
