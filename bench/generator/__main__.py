"""python -m bench.generator: see the package."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM

from bench.bars import figures
from bench.generator.model import LOADS, TINY, write_model
from bench.generator.report import table
from bench.output import bench_parser, machine, write_results
from bench.process import Process, cpu_s

ENGINES = ("transformers", "vllm")
"""Each needs a package of its name."""


def main() -> None:
    args = _parser().parse_args()
    engines = args.engines or [name for name in ENGINES if importlib.util.find_spec(name)]
    found: dict[str, float] = {}
    failed = []
    with tempfile.TemporaryDirectory(prefix="generator-") as temporary:
        folder = Path(temporary)
        sizes = TINY if args.tiny else LOADS[args.load].sizes
        write_model(folder / "model", sizes)
        millions = _millions(folder / "model")
        for engine in engines:
            try:
                measured = _figures(folder, engine, args) if args.rounds else {}
                measured |= _half_gaps(folder, engine, sizes) if args.load == "long" else {}
            except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                print(f"{engine} failed: {error}", file=sys.stderr, flush=True)
                failed.append(engine)
            else:
                found |= {f"{name}.{engine}": value for name, value in measured.items()}
    text = table(found, engines, millions, args.rounds, machine(), args.load)
    print(text)
    result = {
        "figures": found,
        "machine": machine(),
        "million_parameters": millions,
        "rounds": args.rounds,
        "load": args.load,
    }
    write_results(args.json, result, args.table, text)
    if failed:
        sys.exit(1)


def _figures(folder: Path, engine: str, args: argparse.Namespace) -> dict[str, float]:
    """Of one engine: everything in turns, round by round, and then the log-probs."""
    said = {"folder": str(folder), "engine": engine, "load": args.load}
    with Process(["bench.generator.learner"], folder / "learner.log", said) as learner:
        address = learner.hears()
        with Process(["bench.generator.pool"], folder / "pool.log", {**said, "address": address}) as pool:

            def measured(what: str) -> dict[str, float]:
                begun, used_s = time.perf_counter(), cpu_s(learner.pid)
                pool.tell({"do": what, "seconds": args.seconds})
                answer: dict[str, float] = pool.hears()
                answer["learner_cores"] = (cpu_s(learner.pid) - used_s) / (time.perf_counter() - begun)
                print(engine, what, answer, file=sys.stderr, flush=True)
                return answer

            measured("alike")  # the engine may have been starting
            # Each way round in turn, so that a machine which gets slower or faster favours neither.
            orders = itertools.cycle((("alike", "bare", "long_tail"), ("long_tail", "bare", "alike")))
            kept = [_round(**{what: measured(what) for what in next(orders)}) for _ in range(args.rounds)]
            pool.tell({"do": "shorten"})
            learner.tell("check")
            gaps = learner.hears()
            learner.tell("end")
            pauses = learner.hears()
    compared = {f"logprob_diff_{when}": gap for when, gap in gaps.items()}
    return {**figures(kept, ()), **compared, "logprob_diff_max": float(np.max([*gaps.values()])), **pauses}


def _half_gaps(folder: Path, engine: str, sizes: Mapping[str, Any]) -> dict[str, float]:
    """In bfloat16, by `model.head_dtype`; each in a process of its own."""
    half = folder / "half"
    if not half.exists():
        write_model(half / "model", sizes)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(half / "model"))
        model.bfloat16().save_pretrained(half / "model")
    found: dict[str, float] = {}
    for head in ("none", "float32"):
        command = [sys.executable, "-m", "bench.generator.half", str(half), engine, head]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        gap = json.loads(ran.stdout.splitlines()[-1])
        found |= {f"half_gap_{name}_{head}": value for name, value in gap.items()}
    return found


def _round(alike: dict[str, float], bare: dict[str, float], long_tail: dict[str, float]) -> dict[str, float]:
    return {
        "tokens_per_s_worker": alike["tokens_per_s"],
        "tokens_per_s_bare": bare["tokens_per_s"],
        "worker_over_bare": alike["tokens_per_s"] / bare["tokens_per_s"],
        "learner_cores_worker": alike["learner_cores"],
        "learner_cores_bare": bare["learner_cores"],
        "busy_long_tail": long_tail["busy"],
        "busy_endless": bare["busy"],
        "busy_share": long_tail["busy"] / bare["busy"],
    }


def _millions(folder: Path) -> float:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("generator", "Worker and queue beside the bare engine.")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="default: those there are")
    parser.add_argument(
        "--load", choices=LOADS, default="long", help="long answers, or the demo's short ones"
    )
    parser.add_argument("--rounds", type=int, default=7, help="0: the gaps in bfloat16 alone")
    parser.add_argument("--seconds", type=float, default=12.0, help="of one measurement")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to see that all works")
    return parser


if __name__ == "__main__":
    main()
