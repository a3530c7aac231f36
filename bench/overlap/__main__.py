"""Runs with scripted stages beside the times that these allow: what the queue, the workers and the loops cost.

    python -m bench.overlap --json F --table F

Every process is that of a run: queue, generators, learner, weight stream. Only the engine (engine.py) and the passes of
the policy (backend.py) sleep in place of computing, with lengths of a long tail (times.py). Rounds alternate:

    generation-bound   generators have 1.5 times as much to do as the learner, max_staleness 2
    training-bound     the learner has 1.5 times as much to do
    one-step           the first of these, max_staleness 1
    synchronous        the first of these, max_staleness 0
    overhead           a learner whose passes take a given time, with groups always there: what a step takes beyond it
    …, queued          the same with passes on a device of their own, as a GPU is; in the others the learner's thread
                       sleeps for them, as a CPU computes
    crowd              1,000 generators of one group each (crowd.py)
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.launch.local_run import train
from asyncrl.learner.training import requirements
from asyncrl.tasks.addition import write_model_folder
from asyncrl.telemetry.sinks import read_rows
from bench.bars import Bar, Measured, figures, verdict_table
from bench.output import bench_parser, machine, write_results
from bench.overlap import crowd
from bench.overlap.times import Times, overlapping_s, synchronous_s

GROUPS, GROUP_SIZE, SLOTS = 64, 8, 128
BUSY_S = 1.2
"""Seconds that the slower pool works for a version."""

IMBALANCE = 1.5
QUEUED_STEP_S = 0.01
"""An optimizer step on a device: AdamW of 1.7 billion float32 parameters, 28 bytes each, at an H200's 4.8 TB/s. On a
CPU it would be work of the learner's thread like its passes, and is left out."""

SKIPPED = 4
"""Versions at the beginning of a run that are not measured."""

BARS = [
    Bar("generation_bound", 0.97),
    Bar("training_bound", 0.97),
    Bar("synchronous", 0.97),
    Bar("overhead_ms", 5.0, most=True),
    Bar("training_bound_queued", 0.97),
    Bar("synchronous_queued", 0.97),
    Bar("overhead_queued_ms", 5.0, most=True),
    Bar("crowd", 0.95),
]
NAMES = {
    "generation_bound": "generation-bound, max_staleness 2: bound of the stage times / time",
    "training_bound": "training-bound, max_staleness 2: bound / time",
    "one_step": "generation-bound, max_staleness 1: bound / time",
    "synchronous": "generation-bound, max_staleness 0: bound of groups in order, in whole claims / time",
    "synchronous_any_order": "the same: bound of groups in any order, one at a time / time",
    "overhead_ms": "ms of a step of 512 rollouts beyond its passes",
    "training_bound_queued": "training-bound, max_staleness 2, queued: bound / time",
    "synchronous_queued": "generation-bound, max_staleness 0, queued: bound of groups in order / time",
    "synchronous_queued_any_order": "the same: bound of groups in any order / time",
    "overhead_queued_ms": "queued: ms of a step of 512 rollouts beyond its passes",
    "crowd": "1,000 generators: their busy share",
    "crowd_groups_per_s": "groups/s of the 1,000 generators",
    "crowd_cores_queue": "cores that their queue used",
    "crowd_cores_learner": "cores that their learner used",
    "crowd_cores_generators": "cores that they used themselves",
}


@dataclass(frozen=True, slots=True)
class Arm:
    """generation_s, training_s: a version's work of each pool, in seconds"""

    name: str
    generation_s: float
    training_s: float
    max_staleness: int
    versions: int
    queued: bool = False

    def times(self) -> Times:
        tokens = GROUPS * GROUP_SIZE * Times().mean_length()
        step_s = QUEUED_STEP_S if self.queued else 0.0
        return replace(
            Times(),
            token_s=self.generation_s * SLOTS / tokens,
            train_token_s=(self.training_s - step_s) / tokens,
            step_s=step_s,
            queued=self.queued,
        )


def arms(versions: int) -> list[Arm]:
    less = BUSY_S / IMBALANCE
    return [
        Arm("generation_bound", BUSY_S, less, 2, versions),
        Arm("training_bound", less, BUSY_S, 2, versions),
        Arm("one_step", BUSY_S, less, 1, versions),
        Arm("synchronous", BUSY_S, less, 0, versions),
        Arm("overhead_ms", BUSY_S / 6, BUSY_S / 2, 4, versions),
        Arm("training_bound_queued", less, BUSY_S, 2, versions, queued=True),
        Arm("synchronous_queued", BUSY_S, less, 0, versions, queued=True),
        Arm("overhead_queued_ms", BUSY_S / 6, BUSY_S / 2, 4, versions, queued=True),
    ]


def measured(arm: Arm, folder: Path) -> Measured:
    times = arm.times()
    config = config_of(arm, times, folder)
    rows = run(config, arm, times, folder)[SKIPPED:]
    seconds, tokens = (sum(row[name] for row in rows) for name in ("perf/step_s", "train/tokens"))
    if arm.name.startswith("overhead"):
        beyond = median(row["perf/step_s"] - times.train_s(row["train/tokens"]) for row in rows)
        return {arm.name: 1e3 * beyond}
    if arm.max_staleness > 0:
        return {arm.name: overlapping_s(times, tokens, len(rows), SLOTS) / seconds}
    groups = [_lengths(times, row["version"]) for row in rows]
    in_order, any_order = (
        sum(synchronous_s(times, each, SLOTS, claim_tokens) for each in groups) / seconds
        for claim_tokens in (requirements.claim_tokens(config), None)
    )
    return {arm.name: in_order, f"{arm.name}_any_order": any_order}


def _lengths(times: Times, version: int) -> list[list[int]]:
    """The samples' lengths of each group of the step that has made this version."""
    return times.lengths(range((version - 1) * GROUPS, version * GROUPS), GROUP_SIZE)


def run(config: Config, arm: Arm, times: Times, folder: Path) -> list[Mapping[str, Any]]:
    """The rows of its versions."""
    shutil.rmtree(folder / arm.name, ignore_errors=True)
    os.environ.update(times.environment())
    train(config)
    return [row for row in read_rows(folder / arm.name / "metrics.jsonl") if "perf/step_s" in row]


def config_of(arm: Arm, times: Times, folder: Path) -> Config:
    model = folder / "model"
    write_model_folder(str(model), hidden_size=32, layers=1)
    return load_config(
        Path(__file__).with_name("overlap.yaml"),
        [
            *(f"run.dir={folder}", f"run.name={arm.name}", f"run.versions={arm.versions + SKIPPED}"),
            *(f"model.path={model}", f"queue.max_staleness={arm.max_staleness}"),
            *(f"batch.groups={GROUPS}", f"batch.group_size={GROUP_SIZE}", f"generator.slots={SLOTS}"),
            *(f"generator.max_tokens={times.longest}", f"generator.max_length={times.longest + 16}"),
        ],
    )


def main() -> None:
    parser = bench_parser("overlap", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dir", type=Path, default=Path("runs/bench/overlap"), help="where run folders go")
    parser.add_argument("--versions", type=int, default=25, help="of each run that are measured")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of rounds")
    args = parser.parse_args()
    repetitions = []
    for repetition in range(args.repetitions):
        found: dict[str, float] = {}
        for name, measure in rounds(args):
            if not args.only or name in args.only:
                found |= measure()
                print(f"repetition {repetition + 1}, {name}: {found}", flush=True)
        repetitions.append(found)
    made = figures(repetitions, BARS)
    print(text := table(made, args))
    write_results(args.json, {"figures": made, "repetitions": repetitions}, args.table, text)


def rounds(args: argparse.Namespace) -> list[tuple[str, Callable[[], Measured]]]:
    made: list[tuple[str, Callable[[], Measured]]] = [
        (arm.name, lambda arm=arm: measured(arm, args.dir))  # type: ignore[misc]
        for arm in arms(args.versions)
    ]
    return [*made, ("crowd", lambda: crowd.measured(args.dir))]


def table(made: Measured, args: argparse.Namespace) -> str:
    lines: Sequence[str] = [
        "# Overlap with scripted stages",
        "",
        f"`python -m bench.overlap`, medians of {args.repetitions} repetitions of {args.versions} versions, "
        f"{GROUPS} groups of {GROUP_SIZE} each. {machine()}",
        "",
        "| figure | value |",
        "|---|--:|",
        *(f"| {NAMES[name]} | {value:.3g} |" for name, value in made.items() if name in NAMES),
        "",
        *verdict_table(made, BARS),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
