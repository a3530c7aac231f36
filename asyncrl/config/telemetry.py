"""The keys of the section `telemetry`: what a run tells, and to whom, beside metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.rules import at_least_0, require

SINKS = ("tensorboard", "wandb")


@dataclass(frozen=True)
class TelemetryConfig:
    # fmt: off
    rollouts_every: int = 10  # versions between those of which rollouts.jsonl has a few rollouts, as text; the first
    #                            version is always one of them; 0: none
    sinks: tuple[str, ...] = ()  # where rows go beside metrics.jsonl: tensorboard (in the run folder), wandb
    # fmt: on

    def __post_init__(self) -> None:
        at_least_0("telemetry", rollouts_every=self.rollouts_every)
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
