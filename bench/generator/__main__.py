"""python -m bench.generator: see the package."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

from bench.bars import figures
from bench.generator.model import SIZES, TINY, write_model
from bench.generator.report import table
from bench.process import Process

ENGINES = {"transformers": "asyncrl.generator.transformers_engine", "vllm": "asyncrl.generator.vllm_engine"}


def main() -> None:
    args = _parser().parse_args()
    engines = args.engines or [name for name, module in ENGINES.items() if importlib.util.find_spec(module)]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="generator-") as temporary:
        folder = Path(temporary)
        write_model(folder / "model", TINY if args.tiny else SIZES)
        millions = _millions(folder / "model")
        for engine in engines:
            measured = _figures(folder, engine, args.rounds, args.seconds)
            found |= {f"{name}.{engine}": value for name, value in measured.items()}
    machine = (
        f"{os.cpu_count()} × {platform.machine()}, {platform.system()}, Python {platform.python_version()}."
    )
    text = table(found, engines, millions, args.rounds, machine)
    print(text)
    result = {"figures": found, "machine": machine, "million_parameters": millions, "rounds": args.rounds}
    for path, written in ((args.json, json.dumps(result, indent=1) + "\n"), (args.table, text)):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(written, encoding="utf-8")


def _figures(folder: Path, engine: str, rounds: int, seconds: float) -> dict[str, float]:
    """Of one engine: everything in turns, round by round, and then the log-probs."""
    said = {"folder": str(folder), "engine": engine}
    with _process("learner", folder) as learner:
        learner.tell(said)
        address = learner.hears()
        with _process("pool", folder) as pool:
            pool.tell({**said, "address": address})

            def measured(what: str) -> dict[str, float]:
                pool.tell({"do": what, "seconds": seconds})
                answer: dict[str, float] = pool.hears()
                print(engine, what, answer, file=sys.stderr, flush=True)
                return answer

            measured("alike")  # the engine may have been starting
            kept = [_round(measured("alike"), measured("bare"), measured("long_tail")) for _ in range(rounds)]
            pool.tell({"do": "shorten"})
            learner.tell("check")
            gaps = learner.hears()
            learner.tell("end")
            pauses = learner.hears()
    before, after = gaps["before"], gaps["after"]
    compared = {
        "logprob_diff_before": before,
        "logprob_diff_after": after,
        "logprob_diff_max": max(before, after),
    }
    return {**figures(kept, ()), **compared, **pauses}


def _round(through: dict[str, float], bare: dict[str, float], tail: dict[str, float]) -> dict[str, float]:
    return {
        "tokens_per_s_worker": through["tokens_per_s"],
        "tokens_per_s_bare": bare["tokens_per_s"],
        "worker_over_bare": through["tokens_per_s"] / bare["tokens_per_s"],
        "busy_long_tail": tail["busy"],
        "busy_endless": bare["busy"],
        "busy_share": tail["busy"] / bare["busy"],
    }


@contextmanager
def _process(name: str, folder: Path) -> Iterator[Process]:
    made = Process([f"bench.generator.{name}"], folder / f"{name}.log")
    try:
        yield made
    finally:
        made.end()


def _millions(folder: Path) -> float:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.generator", description="Worker and queue beside the bare engine."
    )
    parser.add_argument("--json", type=Path, help="figures")
    parser.add_argument("--table", type=Path, help="Markdown")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), help="default: those there are")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of one measurement")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to see that all works")
    return parser


if __name__ == "__main__":
    main()
