"""What staleness does to learning, and what the correction gives back: the plot of the README.

    make demo && python -m bench.staleness --json bench/results/staleness.json --plot docs/figures/staleness.svg

For each seed the demo task is trained three times from the same warm start, in real separate processes:

    fresh        max_staleness 1, otherwise as the demo is
    corrected    max_staleness 8; the clipped ratio is taken against the recorded behaviour log-probs
    uncorrected  max_staleness 8; behaviour log-probs ignored (plain policy gradient, as if data were on-policy)

Both stale arms have half the demo's learning rate and twice (corrected) or once (uncorrected) its versions; a run ends
at the bar. The queue is let run full (depth (η + 1)·B), so η = 8 really trains on old data: the mean staleness is in
the figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.launch.local_run import train
from asyncrl.telemetry.sinks import read_rows
from bench.output import write_results

UNCORRECTED = ["algorithm.loss=reinforce", "algorithm.proximal=frozen", "algorithm.correction.kind=none"]
STALE = ["queue.max_staleness=8", "learner.optimizer.lr=1e-4"]
FULL_QUEUE = ["queue.depth=null", "queue.window=1"]
ARMS = {
    # arm: (overrides, versions as a multiple of --versions)
    "fresh": (["queue.max_staleness=1"], 1),
    "uncorrected": ([*STALE, *UNCORRECTED], 1),
    # Far above the clip, a negative advantage pulls with a weight of up to 10 at this age: the dual clip ends that.
    "corrected": ([*STALE, "algorithm.dual_clip=2"], 2),
}


def run_arm(args: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """Train once; returns the held-out curve [(version, accuracy)] and the mean staleness."""
    name = f"staleness-{arm}-{seed}"
    folder = Path(args.dir) / name
    changes, multiple = ARMS[arm]
    shutil.rmtree(folder, ignore_errors=True)
    overrides = [
        f"run.name={name}",
        f"run.dir={args.dir}",
        f"run.seed={seed}",
        f"run.versions={multiple * args.versions}",
        f"run.target_accuracy={args.bar}",
        f"model.path={args.model}",
        "launch.quiet=true",
        *FULL_QUEUE,
        *changes,
    ]
    summary = train(load_config(args.config, overrides))
    rows = read_rows(folder / "metrics.jsonl")
    curve = [(row["version"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    print(
        f"{name}: {curve[0][1]:.3f} -> {curve[-1][1]:.3f}, staleness {summary['staleness']['mean']:.2f}",
        flush=True,
    )
    return {
        "curve": sorted(curve),
        "staleness_mean": summary["staleness"]["mean"],
        "train_s": summary["train_s"],
    }


def first_version_at(curve: list[tuple[int, float]], accuracy: float) -> int | None:
    return next((version for version, value in curve if value >= accuracy), None)


def figures(runs: dict[str, dict[int, dict[str, Any]]], bar: float) -> dict[str, Any]:
    """Medians over the seeds, one entry per arm and quantity."""
    found: dict[str, Any] = {}
    for arm, by_seed in runs.items():
        ends = [run["curve"][-1][1] for run in by_seed.values()]
        found[f"accuracy_end.{arm}"] = statistics.median(ends)
        found[f"accuracy_end_min.{arm}"] = min(ends)
        found[f"accuracy_end_max.{arm}"] = max(ends)
        found[f"staleness_mean.{arm}"] = statistics.median(run["staleness_mean"] for run in by_seed.values())
        found[f"versions_to_bar.{arm}"] = [first_version_at(run["curve"], bar) for run in by_seed.values()]
    return found


def draw(runs: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 3.6))
    for arm, colour in zip(runs, ("#2b8a3e", "#c92a2a", "#1864ab"), strict=True):
        for i, run in enumerate(runs[arm].values()):
            versions, accuracy = zip(*run["curve"], strict=True)
            label = f"{arm} (mean staleness {run['staleness_mean']:.1f})" if i == 0 else None
            axes.plot(versions, accuracy, color=colour, alpha=0.85, linewidth=1.4, label=label)
    axes.set(xlabel="version", ylabel="held-out accuracy", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/recipes/demo.yaml")
    parser.add_argument("--model", default="runs/addition/warm", help="warm-started model folder")
    parser.add_argument("--dir", default="runs", help="where the run folders go")
    parser.add_argument("--versions", type=int, default=320, help="of the fresh arm (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bar", type=float, default=0.96, help="accuracy at which a run ends")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    runs: dict[str, dict[int, dict[str, Any]]] = {arm: {} for arm in ARMS}
    for seed in args.seeds:
        for arm in ARMS:
            runs[arm][seed] = run_arm(args, arm, seed)
    report = {"figures": figures(runs, args.bar), "runs": runs}
    print(json.dumps(report["figures"], indent=2))
    write_results(args.json, report)
    if args.plot:
        draw(runs, args.plot)


if __name__ == "__main__":
    main()
