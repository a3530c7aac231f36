"""The bars of the project, and a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from bench.bars import Bar, Measured, number, row, verdict_table

SYSTEMS = {
    "asyncrl_tp1": "asyncrl, to one rank, fastest channel there is",
    "asyncrl_tp2": "asyncrl, to two ranks, each its half",
    "asyncrl_tp1_tcp": "asyncrl over TCP, to one rank",
    "asyncrl_tp2_tcp": "asyncrl over TCP, to two ranks",
    "gloo_per_tensor": "gloo broadcast of each tensor, to two ranks",
    "gloo_per_tensor_1": "the same, to one rank",
    "gloo_packed": "gloo broadcast of 64 MB buckets, to one rank",
    "shm_file": "safetensors through /dev/shm, to one rank",
    "raw_gloo": "one gloo send of 256 MB: the limit of the wire",
    "memcpy": "one copy by one thread: the floor",
}

BARS = (
    Bar("wire_bytes_ratio", 1.005, most=True),
    Bar("gb_per_s.asyncrl_tp1", 0.8, over="gb_per_s.raw_gloo"),
    Bar("gb_per_s.asyncrl_tp1_tcp", 0.8, over="gb_per_s.raw_gloo"),
    Bar("gb_per_s.asyncrl_tp2", 2, over="gb_per_s.gloo_per_tensor"),
    Bar("gb_per_s.asyncrl_tp2_tcp", 2, over="gb_per_s.gloo_per_tensor"),
    Bar("generator_pause_ms", 3, over="generator_pause_floor_ms", most=True),
    Bar("generator_pause_slow_link_ms", 3, over="generator_pause_slow_link_floor_ms", most=True),
    Bar("learner_pause_ms", 3, over="learner_floor_ms", most=True),
    Bar("peak_extra_bytes", 1, over="peak_extra_bar_bytes", most=True),
    Bar("delta_bytes_ratio.plain", 0.04, most=True),
    Bar("delta_bytes_ratio.deflated", 0.02, most=True),
    Bar("plan_671b_s", 10, most=True),
)


def table(found: Measured, sizes: Mapping[int, Measured], machine: str, repetitions: int) -> str:
    """Markdown. found: the figures that bars look at. sizes: millions of parameters -> all that was measured there."""
    names = dict.fromkeys(
        name
        for measured in sizes.values()
        for name in measured
        if not name.startswith("gb_per_s") and " / " not in name
    )
    head = ["", *(f"{millions}M" for millions in sizes)]
    rule = ["---", *("--:" for _ in sizes)]
    return "\n".join(
        [
            "# A new policy's way to a generator",
            "",
            f"`python -m bench.sync`, medians of {repetitions} interleaved repetitions. {machine}",
            "bf16 in Qwen2 shapes, two learner ranks with FSDP's shards. GB/s of unique bytes, from `publish` to"
            " verified live parameters; the others start with the gathered model and verify nothing.",
            "",
            row(["GB/s", *head[1:]]),
            row(rule),
            *(
                row([what, *(number(measured.get(f"gb_per_s.{name}"), ".2f") for measured in sizes.values())])
                for name, what in SYSTEMS.items()
            ),
            "",
            row(head),
            row(rule),
            *(
                row([name, *(number(measured.get(name), ",.4g") for measured in sizes.values())])
                for name in names
            ),
            "",
            *verdict_table(found, BARS),
            "",
        ]
    )
