"""The load of one queue: its costs are measured, and large runs are simulated with them.

    python -m bench.scale --json F --table F

costs.py measures the CPU of the queue's process for groups, bytes, claims and heartbeats. The twin then simulates runs
on the queue's own ledger with these costs (asyncrl/twin/brokers.py), once with all payloads through the queue, and once
for each number of payload brokers.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from asyncrl.config.schema import GeneratorConfig
from asyncrl.learner.train_stream import PARK_S
from asyncrl.twin.outcome import Setup, Simulated
from asyncrl.twin.simulate import simulate
from asyncrl.twin.times import GenerationTimes, LearnerTimes, Lengths, QueueTimes, StageTimes
from bench.bars import Measured, figures
from bench.output import bench_parser, machine, write_results
from bench.scale.costs import costs

POOLS = ((1_000, 256), (4_000, 1_024))
"""Generators, and data ranks of the learner."""

PAYLOAD_BROKERS = (0, 4)
VERSIONS = 24
"""With fewer, the waves of the first versions show: all generators begin at the same time."""

SLOTS, STEP_S = 64, 0.025
"""Of a generator."""

MAX_STALENESS = 4
SPARE = 3.0
"""Rollouts that may be under way over the slots of all generators."""

LEARNER = 0.8
"""The learner's time for a version over the generators': those are the bottleneck."""

CLAIM_TOKENS = 65_536
TEXT, EXPERTS = 8.0, 8.0 + 48 * 8
"""Bytes of a token: as text; with the routes of 8 experts in each of 48 layers, a byte each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    name: str
    lengths: Lengths
    group_size: int
    token_bytes: float = TEXT

    def setup(self, generators: int, ranks: int) -> Setup:
        """Versions of as many groups as keep the generators busy. Of the MAX_STALENESS + 1 versions that may be under
        way, the window takes one."""
        under_way = SPARE * generators * SLOTS / self.group_size
        return Setup(
            groups=round(under_way / MAX_STALENESS),
            group_size=self.group_size,
            generators=generators,
            slots=SLOTS,
            data_ranks=ranks,
            max_staleness=MAX_STALENESS,
            claim_tokens=CLAIM_TOKENS,
        )

    def times(self, setup: Setup, queue: QueueTimes) -> StageTimes:
        """The learner takes LEARNER of the generators' time for a version."""
        rollouts, mean = setup.groups * setup.group_size, self.lengths.mean()
        generate_s = rollouts * mean * STEP_S / (setup.generators * SLOTS)
        of_a_rank = rollouts * (mean + self.lengths.prompt) / setup.data_ranks
        return StageTimes(
            generation=GenerationTimes(step_s=STEP_S, sequence_s=0.0),
            lengths=self.lengths,
            learner=LearnerTimes(token_s=LEARNER * generate_s / of_a_rank, version_s=0.0),
            queue=dataclasses.replace(queue, token_bytes=self.token_bytes),
        )


REASONING = Lengths(median=6_000, sigma=0.8, most=32_000, prompt=500)
JOBS = (
    Job("short answers", Lengths(median=200, sigma=0.7, most=2_000, prompt=100), 8),
    Job("reasoning", REASONING, 16),
    Job("reasoning, with the routes of experts", REASONING, 16, EXPERTS),
)


def queue_times(found: Mapping[str, float]) -> QueueTimes:
    """Those of the costs. A generator sends a heartbeat with each group too, for the learner's totals."""
    return QueueTimes(
        group_s=found["group_s"] + found["heartbeat_s"],
        byte_s=found["byte_s"],
        request_s=found["request_s"],
        generator_share=found["heartbeat_s"] / GeneratorConfig().heartbeat_s,
        rank_share=found["poll_s"] / PARK_S,
    )


def simulated(
    queue: QueueTimes, jobs: Sequence[Job], pools: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """A row for each job, size of the pools and number of payload brokers."""
    for job in jobs:
        for generators, ranks in pools:
            setup = job.setup(generators, ranks)
            free = simulate(setup, job.times(setup, QueueTimes()), VERSIONS)
            for brokers in PAYLOAD_BROKERS:
                several = dataclasses.replace(setup, payload_brokers=brokers)
                yield _row(job, simulate(several, job.times(setup, queue), VERSIONS), free)
                print(f"{job.name}, {generators} generators, {brokers} payload brokers", flush=True)


def _row(job: Job, outcome: Simulated, free: Simulated) -> dict[str, Any]:
    """free: of a queue that costs nothing"""
    setup = outcome.setup
    return {
        "job": job.name,
        "generators": setup.generators,
        "data_ranks": setup.data_ranks,
        "payload_brokers": setup.payload_brokers,
        "groups_per_s": outcome.groups_per_s,
        "of_a_free_queue": outcome.groups_per_s / free.groups_per_s,
        "generators_busy": outcome.busy("generators"),
        "queue_busy": outcome.brokers[0],
        "payload_brokers_busy": max(outcome.brokers[1:], default=0.0),
    }


def table(found: Measured, rows: Sequence[Mapping[str, Any]], repetitions: int) -> str:
    queue = queue_times(found)
    lines = [
        "# The load of one queue",
        "",
        f"`python -m bench.scale`, medians of {repetitions} repetitions. {machine()}",
        "",
        "| CPU of the queue's process | |",
        "|---|--:|",
        f"| a group without its payload | {1e6 * found['group_s']:.0f} µs |",
        f"| a megabyte of payload, in and out | {1e12 * found['byte_s']:.0f} µs |",
        f"| a further request of a claim | {1e6 * found['request_s']:.0f} µs |",
        f"| a heartbeat | {1e6 * found['heartbeat_s']:.0f} µs |",
        f"| a claim that brings nothing | {1e6 * found['poll_s']:.0f} µs |",
        "",
        f"So one core hands on {1 / queue.group_s:,.0f} groups/s with a heartbeat each, or "
        f"{1e-9 / queue.byte_s:.2f} GB/s of payloads. Heartbeats of 1,000 generators take "
        f"{1000 * queue.generator_share:.1%} of it, 256 ranks that wait {256 * queue.rank_share:.1%}.",
        "",
        "| run, simulated | generators + ranks | payload brokers | groups/s | of a queue that costs nothing "
        "| generators busy | queue busy | payload brokers busy |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *(
            f"| {row['job']} | {row['generators']:,} + {row['data_ranks']:,} | {row['payload_brokers'] or 'none'} "
            f"| {row['groups_per_s']:,.4g} | {row['of_a_free_queue']:.2f} | {row['generators_busy']:.0%} "
            f"| {row['queue_busy']:.0%} | {row['payload_brokers_busy']:.0%} |"
            for row in rows
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = bench_parser("scale", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the groups and requests that are measured"
    )
    args = parser.parse_args()
    repetitions = []
    with TemporaryDirectory() as folder:
        for repetition in range(args.repetitions):
            repetitions.append(costs(Path(folder), args.scale))
            print(f"repetition {repetition + 1}: {repetitions[-1]}", flush=True)
    found = figures(repetitions, [])
    rows = list(simulated(queue_times(found), JOBS, POOLS))
    print(text := table(found, rows, args.repetitions))
    result = {"figures": found, "repetitions": repetitions, "simulated": rows}
    write_results(args.json, result, args.table, text)


if __name__ == "__main__":
    main()
