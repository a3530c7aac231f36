"""The keys of the section `telemetry`: what a run tells, and to whom, beside metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.sections.limits import Amount, check_values
from asyncrl.config.sections.rules import require

SINKS = ("tensorboard", "wandb")


@dataclass(frozen=True)
class TelemetryConfig:
    # fmt: off
    rollouts_every: Amount = 10  # versions between those of which rollouts.jsonl has a few rollouts, as text; the first
    #                            version is always one of them; 0: none
    sinks: tuple[str, ...] = ()  # where rows go beside metrics.jsonl: tensorboard (in the run folder), wandb
    # fmt: on

    def __post_init__(self) -> None:
        check_values("telemetry", self)
        for name in self.sinks:
            require(
                name in SINKS,
                "telemetry.sinks",
                name,
                "is no sink; metrics.jsonl is always written",
                f"choose from {', '.join(SINKS)}",
            )
        require(
            len(set(self.sinks)) == len(self.sinks),
            "telemetry.sinks",
            list(self.sinks),
            "names a sink twice",
            "take one out",
        )
