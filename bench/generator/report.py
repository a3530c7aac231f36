"""The bars of the project, and a table. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from bench.bars import Bar, Measured, number, row, verdict_table
from bench.generator.model import LOADS

FIGURES = {
    "tokens_per_s_worker": "tokens/s through worker and queue",
    "tokens_per_s_bare": "tokens/s of the engine alone",
    "worker_over_bare": "their ratio",
    "learner_cores_worker": "cores that the learner's process took meanwhile",
    "learner_cores_bare": "the same beside the engine alone",
    "busy_long_tail": "slots in use, answers with a long tail",
    "busy_endless": "slots in use, the engine alone, all answers alike",
    "busy_share": "their ratio",
    "logprob_diff_before": "largest difference of a log-prob from the learner's",
    "logprob_diff_after": "the same after updates of the weights",
    "pause_ms_p50": "pause of an update, ms, median",
    "half_gap_mean_none": "in bfloat16: mean difference of a log-prob from the learner's",
    "half_gap_mean_float32": "the same with model.head_dtype=float32",
    "half_gap_max_none": "in bfloat16: the largest difference",
    "half_gap_max_float32": "the same with model.head_dtype=float32",
}


def bars(engines: Iterable[str], load: str = "long") -> list[Bar]:
    return [
        bar
        for engine in engines
        for bar in (
            Bar(f"worker_over_bare.{engine}", 0.95 if load == "long" else 0.8),
            Bar(f"busy_share.{engine}", 0.95),
            Bar(f"logprob_diff_max.{engine}", 1e-4, most=True),
        )
    ]


def table(
    found: Measured, engines: Iterable[str], parameters: float, rounds: int, machine: str, load: str = "long"
) -> str:
    """Markdown. found: figures as 'name.engine'."""
    engines, of = list(engines), LOADS[load]
    return "\n".join(
        [
            "# What a generator makes of its engine",
            "",
            f"`python -m bench.generator --load {load}`, medians of {rounds} rounds of one run. {machine}",
            f"A random model of {parameters:.1f}M parameters in float32, one thread; a version each {of.groups} groups "
            f"of {of.group}, η = 4, every one of them streamed to the generator whole. {of.slots} samples at once; "
            f"prompts of {of.prompt} tokens, answers of {of.mean}.",
            "",
            row(["", *engines]),
            row(["---", *("--:" for _ in engines)]),
            *(
                row([text, *(number(found.get(f"{name}.{engine}"), ",.4g") for engine in engines)])
                for name, text in FIGURES.items()
            ),
            "",
            *verdict_table(found, bars(engines, load)),
            "",
        ]
    )
