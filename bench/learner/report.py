"""The bars of the project, and a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from bench.bars import Bar, Measured, number, row, verdict_table

BARS = (
    Bar("packed_over_padded.short", 1.4),
    Bar("packed_over_padded.long_tail", 2),
    Bar("shared_over_every.long_prompt", 2.5),
    Bar("train_over_trl", 1.5),
    Bar("loss_memory_ratio", 0.45, most=True),
    Bar("overhead_share", 0.05, most=True),
    Bar("scaling_2", 1.6),
)

FIGURES = {
    "packed_tokens_per_s.short": "tokens/s forward and backward, packed, answers of 16 to 256 tokens",
    "packed_over_padded.short": "over padded",
    "packed_tokens_per_s.long_tail": "tokens/s, packed, answers of 16 to 2048 tokens with a long tail",
    "packed_over_padded.long_tail": "over padded",
    "packed_tokens_per_s.long_prompt": "tokens/s, packed, answers of 16 to 256 tokens to prompts of 512",
    "packed_over_padded.long_prompt": "over padded",
    "shared_over_every.long_prompt": "each group's prompt once over all of them",
    "shared_over_every_limit.long_prompt": "the same by tokens alone",
    "shared_over_every.short": "the same with answers of 16 to 256 tokens to prompts of 16",
    "shared_over_every_limit.short": "the same by tokens alone",
    "samples_per_s": "rollouts/s of a whole training step",
    "train_over_trl": "over TRL's GRPOTrainer after generation",
    "overhead_share": "share of the step that is not the model's forward, backward and optimizer step",
    "scaling_2": "two processes over one",
    "loss_memory_mib": "MiB for log-probs, entropies and gradients of 2048 tokens at a vocabulary of 32k",
    "loss_memory_ratio": "over the plain way",
}

GPU_FIGURES = {
    "mfu": "MFU",
    "tokens_per_s": "tokens/s",
    "peak_gib": "peak GiB",
    "plain_mfu": "MFU, plain loop",
    "plain_tokens_per_s": "tokens/s, plain loop",
    "plain_peak_gib": "peak GiB, plain loop",
}


def table(found: Measured, millions: float, repetitions: int, machine: str) -> str:
    """Markdown."""
    return "\n".join(
        [
            "# The learner's half of a step",
            "",
            f"`python -m bench.learner`, medians of {repetitions} interleaved repetitions of one run. {machine}",
            f"A random Qwen2 of {millions:.0f}M parameters in float32, one thread a process.",
            "",
            row(["", ""]),
            row(["---", "--:"]),
            *(row([text, number(found.get(name), ",.4g")]) for name, text in FIGURES.items()),
            "",
            *verdict_table(found, BARS),
            "",
        ]
    )


def gpu_table(found: Mapping[str, Measured], tokens: int, machine: str) -> str:
    """found: figures by model."""
    return "\n".join(
        [
            "# The learner on one GPU",
            "",
            f"`python -m bench.learner --gpu`. {machine}",
            f"Random weights in bf16, {tokens} packed tokens a micro-batch, forward, backward and optimizer step. The "
            "plain loop is transformers with flash attention, padded, and torch's cross entropy.",
            "",
            row(["", *GPU_FIGURES.values()]),
            row(["---", *("--:" for _ in GPU_FIGURES)]),
            *(
                row([name, *(number(measured.get(key), ",.3g") for key in GPU_FIGURES)])
                for name, measured in found.items()
            ),
            "",
        ]
    )
