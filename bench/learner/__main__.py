"""python -m bench.learner: see the package."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from asyncrl.learner.reporting.utilization import TrainingFlops
from asyncrl.system.rank_process import FOLDER, MEETING
from bench.bars import Measured, figures
from bench.learner.model import SIZES, TINY, config_of, write_model
from bench.learner.report import table
from bench.learner.rollouts import GROUP, PROMPT, samples
from bench.output import bench_parser, machine, write_results
from bench.process import ROOT, Process

PEER = ROOT / "bench/peers/.venv-trl/bin/python"

GROUPS = {"short": 4, "long_tail": 1, "long_prompt": 1}
"""Of eight rollouts each, in one measurement of passes."""

STEP_GROUPS = 6
"""The same of a step."""

RANKS = 2

LONGEST_S = 900.0
"""Of one measurement on a busy machine; a quiet one takes some 20 s."""


class Trial:
    """All processes of a run. They take turns; ratios are of measurements next to each other."""

    def __init__(self, folder: Path, stack: ExitStack, args: argparse.Namespace) -> None:
        self._folder, self._stack, self._scale = folder, stack, 0.1 if args.tiny else 1.0
        self._common = {"folder": str(folder), "clock": args.clock, "scale": self._scale}
        self._passes = self._start("passes", {"groups": GROUPS})
        self._alone = self._start("steps", {"groups": STEP_GROUPS, "environment": {}})
        self._trl = (
            self._start("trl_peer", {"groups": STEP_GROUPS}, args.peer) if args.peer.exists() else None
        )
        self._ranks = self._start_ranks()

    def warm(self) -> None:
        """Whatever is slow only once."""
        for way in ("packed", "padded"):
            self._ask(self._passes, {"kind": "short", "way": way})
        self._steps()

    def repetition(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for kind, groups in GROUPS.items():
            packed_s, every_s, padded_s = (
                self._ask(self._passes, {"kind": kind, "way": w})
                for w in ("packed", "every_prompt", "padded")
            )
            found[f"packed_tokens_per_s.{kind}"] = _tokens(kind, groups, self._scale) / packed_s
            found[f"packed_over_padded.{kind}"] = padded_s / packed_s
            found[f"shared_over_every.{kind}"] = every_s / packed_s
            found[f"shared_over_every_limit.{kind}"] = _sharing_limit(kind, groups, self._scale)
        found |= self._steps()
        chunked, naive = (self._peak_bytes(way) for way in ("chunked", "naive"))
        found |= {"loss_memory_mib": chunked / (1 << 20), "loss_memory_ratio": chunked / naive}
        return found

    def _steps(self) -> dict[str, float]:
        self._alone.tell("go")
        alone = self._alone.hears(LONGEST_S)
        for rank in self._ranks:
            rank.tell("go")
        together_s = max(rank.hears(LONGEST_S)["seconds"] for rank in self._ranks)
        rollouts = sum(map(len, samples("short", STEP_GROUPS, self._scale)))
        found = {
            "samples_per_s": rollouts / alone["seconds"],
            "overhead_share": 1 - alone["model_s"] / alone["seconds"],
            "scaling_2": alone["seconds"] / together_s,
        }
        if self._trl is not None:
            found["train_over_trl"] = self._ask(self._trl, "go") / alone["seconds"]
        return found

    def _ask(self, process: Process, order: Any) -> float:
        process.tell(order)
        return float(process.hears(LONGEST_S)["seconds"])

    def _peak_bytes(self, way: str) -> int:
        with Process(["bench.learner.head"], self._folder / "head.log", way) as process:
            return int(process.hears()["bytes"])

    def _start(
        self, name: str, said: dict[str, Any], python: Path | None = None, log: str = "", wait: bool = True
    ) -> Process:
        words, path = [f"bench.learner.{name}"], self._folder / f"{log or name}.log"
        process = Process(words, path, self._common | said, str(python or sys.executable))
        self._stack.enter_context(process)
        if wait:
            process.hears()
        return process

    def _start_ranks(self) -> list[Process]:
        """Two that share the groups out."""
        meeting = self._folder / "meeting"
        meeting.mkdir(exist_ok=True)
        (meeting / "store").unlink(missing_ok=True)
        place = {
            "WORLD_SIZE": str(RANKS),
            MEETING: f"{FOLDER}:{meeting}",
        }
        ranks = []
        for rank in range(RANKS):
            environment = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            said = {"groups": STEP_GROUPS, "environment": environment}
            ranks.append(self._start("steps", said, log=f"rank{rank}", wait=False))
        for process in ranks:
            process.hears()
        return ranks


def main() -> None:
    args = _parser().parse_args()
    if args.gpu:
        from bench.learner.gpu import main as on_gpu

        on_gpu(args.json, args.table)
        return
    with tempfile.TemporaryDirectory(prefix="learner-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        write_model(folder / "model", TINY if args.tiny else SIZES)
        millions = TrainingFlops.of(config_of(folder).model).weights / 1e6
        trial = Trial(folder, stack, args)
        trial.warm()
        kept: list[Measured] = []
        for _ in range(args.repetitions):
            kept.append(trial.repetition())
            print("  ".join(f"{name} {value:,.3g}" for name, value in kept[-1].items()), flush=True)
    medians = figures(kept, ())
    text = table(medians, millions, args.repetitions, machine())
    print(text)
    result = {"figures": medians, "machine": machine(), "million_parameters": millions, "repetitions": kept}
    write_results(args.json, result, args.table, text)


def _tokens(kind: str, groups: int, scale: float) -> int:
    """Prompts included."""
    return sum(
        PROMPT[kind] + len(sample.answer) for group in samples(kind, groups, scale) for sample in group
    )


def _sharing_limit(kind: str, groups: int, scale: float) -> float:
    """All tokens over those with each group's prompt once."""
    tokens = _tokens(kind, groups, scale)
    return tokens / (tokens - groups * (GROUP - 1) * PROMPT[kind])


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("learner", "The learner's half of a step, beside others.")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: where others work too")
    parser.add_argument("--peer", type=Path, default=PEER, help="python that has TRL, if it is there")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to see that all works")
    parser.add_argument("--gpu", action="store_true", help="the figures of one GPU, and nothing else")
    return parser


if __name__ == "__main__":
    main()
