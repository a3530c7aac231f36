"""The cost of traces and of decisions: of each row, of all rows of a run as a share of its time, in steps per second of
the demo, and in bytes.

    make demo && python -m bench.telemetry --json F --table F

The demo is trained with both, and without each, in turns, every other round in reverse order, from the same warm start.
CPU seconds of a process's tracing are its rows times the measured cost of a row of their kind; their share is that of
the time that the process has lived.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec

from asyncrl.config.load import load_config
from asyncrl.launch.local_run import train
from asyncrl.telemetry import decisions, tracing
from asyncrl.telemetry.decisions import FOLDER as DECISIONS
from asyncrl.telemetry.decisions import SUFFIX as DECIDED
from asyncrl.telemetry.sinks import read_rows
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.trace_file import FOLDER, SUFFIX
from asyncrl.types import TRAIN
from bench.bars import Bar, Measured, figures, number, row, verdict_table
from bench.output import bench_parser, machine, write_results

ARMS = {
    "with": "telemetry.trace_mb=64",
    "without": "telemetry.trace_mb=0",
    "undecided": "telemetry.decisions=false",
}

TOKEN_BYTES = 17
"""Of a rollout in memory: token id, log-prob, version, loss mask."""

WARM_UP_VERSIONS = 5
SPAN, UNWRITTEN, SWITCH, EVENT = "span", "unwritten span", "switch", "event"
KINDS = (SPAN, UNWRITTEN, SWITCH, EVENT)
GROUP = "decisions of a group"
"""A request that joins, a step, and what is written before the commit."""
PROCESSES = ("generator-0", "learner", "queue", "launcher")
BARS = [
    *(Bar(f"share.{process}", 0.01, most=True) for process in PROCESSES),
    Bar("steps_s.with", 0.99, over="steps_s.without"),
    Bar("steps_s.with", 0.98, over="steps_s.undecided"),
    Bar("decisions_time", 0.02, most=True),
    Bar("decisions_share", 0.01, most=True),
]


def cost_of(work: Callable[[], None], count: int) -> float:
    """CPU seconds of one call."""
    begun = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - begun) / count


def costs(count: int) -> dict[str, float]:
    """CPU seconds of one row of each kind, on this machine's disk for temporary files."""
    with (
        tempfile.TemporaryDirectory() as folder,
        tracing.recording(Path(folder), "bench", "generator", 64),
    ):
        loop = Spans("engine")

        def span(least_s: float = 0.0) -> None:
            with tracing.span("rollouts", "generate", least_s, task=12345, version=123):
                pass

        def switch() -> None:  # two rows: there and back
            with loop("wait/tasks"):
                pass

        decided = (Path(folder), "bench", {"role": "generator"})
        with loop("compute"), decisions.recording(*decided):
            numbers = iter(range(10**9))

            def decide() -> None:
                decisions.joined(f"{TRAIN}/{next(numbers)}/1")
                decisions.step(True)
                decisions.flush()

            return {
                GROUP: cost_of(decide, count),
                SPAN: cost_of(span, count),
                UNWRITTEN: cost_of(lambda: span(3600.0), count),
                SWITCH: cost_of(switch, count) / 2,
                EVENT: cost_of(lambda: tracing.event("published", version=123), count),
            }


def rows_of(path: Path) -> tuple[Counter[str], float]:
    """(rows of a trace by kind, seconds that it covers). A group that is scored in no time has a span without a row."""
    kinds, times = Counter[str](), list[float]()
    for line in path.read_bytes().splitlines():
        read = msgspec.json.decode(line)
        times.append(read["t"])
        beside = {"took", "begin", "end"} & read.keys()
        kinds[SPAN if beside else SWITCH if "lane" in read else EVENT] += 1
        kinds[UNWRITTEN] += read.get("do") == "generate"
    return kinds, max(times) - min(times)


def run(args: argparse.Namespace, arm: str) -> Path:
    name = f"telemetry-{arm}"
    folder = Path(args.dir) / name
    shutil.rmtree(folder, ignore_errors=True)
    overrides = (f"run.name={name}", f"run.dir={args.dir}", f"run.versions={args.versions}")
    start = (f"model.path={args.model}", "run.target_accuracy=null", "launch.quiet=true")
    train(load_config(args.config, [*overrides, *start, ARMS[arm]]))
    return folder


def measured(args: argparse.Namespace, cost: dict[str, float], backwards: bool) -> Measured:
    """One round: both arms."""
    found: dict[str, float] = {f"cost_us.{kind}": 1e6 * seconds for kind, seconds in cost.items()}
    for arm in sorted(ARMS, reverse=backwards):
        folder = run(args, arm)
        rows = [each for each in read_rows(folder / "metrics.jsonl") if "perf/step_s" in each]
        found[f"steps_s.{arm}"] = 1 / median(each["perf/step_s"] for each in rows[WARM_UP_VERSIONS:])
        if arm == "with":
            rollouts = TOKEN_BYTES * sum(each["train/tokens_with_prompts"] for each in rows)
            written = sum(path.stat().st_size for path in (folder / DECISIONS).glob(f"*{DECIDED}"))
            found["decisions_bytes"], found["decisions_share"] = written, written / rollouts
            groups = sum(each["train/groups"] for each in rows)
            found["decisions_time"] = cost[GROUP] * groups / sum(each["perf/step_s"] for each in rows)
        for path in (folder / FOLDER).glob(f"*{SUFFIX}"):
            process, (kinds, seconds) = path.name.removesuffix(SUFFIX), rows_of(path)
            found[f"rows_s.{process}"] = (kinds.total() - kinds[UNWRITTEN]) / seconds
            found[f"share.{process}"] = sum(cost[kind] * count for kind, count in kinds.items()) / seconds
    return found


def table(found: Measured, rounds: int, versions: int) -> str:
    lines = [
        "# The cost of traces and decisions",
        "",
        f"`python -m bench.telemetry`, medians of {rounds} rounds of {versions} versions of the demo. {machine()}",
        "",
        "| kind of row | CPU µs |",
        "|---|--:|",
        *(row([kind, number(found[f"cost_us.{kind}"], ".1f")]) for kind in (*KINDS, GROUP)),
        "",
        "| process | rows/s | share of its time |",
        "|---|--:|--:|",
    ]
    for process in PROCESSES:
        cells = (number(found.get(f"rows_s.{process}"), ".0f"), number(found.get(f"share.{process}"), ".3%"))
        lines.append(row([process, *cells]))
    lines += ["", "| steps/s with both | without traces | without decisions |", "|--:|--:|--:|"]
    lines.append(row(number(found.get(f"steps_s.{arm}"), ".4f") for arm in ARMS))
    decided = [found["decisions_bytes"], found["decisions_share"], found["decisions_time"]]
    texts = [number(value, form) for value, form in zip(decided, (",.0f", ".2%", ".3%"), strict=True)]
    lines += [
        "",
        "| bytes of decisions | of the rollouts in memory | CPU of the generator |",
        "|--:|--:|--:|",
        row(texts),
    ]
    return "\n".join([*lines, "", *verdict_table(found, BARS), ""])


def main() -> None:
    parser = bench_parser("telemetry", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default="configs/recipes/demo.yaml")
    parser.add_argument("--model", default="runs/addition/warm", help="warm-started model folder")
    parser.add_argument("--dir", default="runs", help="where the run folders go")
    parser.add_argument("--versions", type=int, default=60, help="of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=20_000, help="of each kind, timed (default: %(default)s)")
    args = parser.parse_args()
    cost = costs(args.rows)
    rounds = [measured(args, cost, backwards=bool(number % 2)) for number in range(args.rounds)]
    found = figures(rounds, BARS)
    print(text := table(found, args.rounds, args.versions), flush=True)
    write_results(args.json, {"figures": found, "rounds": rounds}, args.table, text)


if __name__ == "__main__":
    main()
