"""The section `learner`: how models are spread over its processes, and the optimizer of every model that learns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.config.rules import (
    Amount,
    BelowOne,
    Count,
    NotNegative,
    Positive,
    Processes,
    Rule,
    Seconds,
    Section,
    Share,
    Threads,
    device_rules,
    key,
)


@dataclass(frozen=True)
class ParallelConfig(Section):
    """The processes beyond these axes shard parameters, gradients and optimizer (FSDP)."""

    tensor: Processes = key(1, "processes that share each matrix; they learn from the same groups")
    sequence: bool = key(True, "with tensor > 1: what stands between the matrices is shared too, by tokens")
    context: Processes = key(1, "processes that share the tokens of each micro-batch")
    context_way: Literal["ulysses", "all_gather"] = key(
        "ulysses", "tokens for heads and back, or all keys to everybody"
    )
    expert: Processes = key(1, "processes that share the experts of each layer")
    pipeline: Processes = key(1, "processes one after another, each with some of the layers")
    pipeline_schedule: Literal["1f1b", "interleaved"] = key(
        "1f1b", "interleaved: each has several runs of layers"
    )
    pipeline_stages_per_rank: Processes = key(2, "how many; interleaved only")
    replicate: Processes = key(1, "copies of the sharded model, each with groups of its own (HSDP)")

    @property
    def stages_per_rank(self) -> int:
        return self.pipeline_stages_per_rank if self.pipeline_schedule == "interleaved" else 1

    @property
    def stages(self) -> int:
        """Runs of layers that the model is cut into."""
        return self.pipeline * self.stages_per_rank if self.pipeline > 1 else 1

    @property
    def processes(self) -> int:
        """The world must be a multiple of this; the quotient is the shard axis."""
        return math.prod((self.pipeline, self.replicate, self.context, self.tensor))


@dataclass(frozen=True)
class OptimizerConfig(Section):
    lr: Positive = 1e-6
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    warmup_steps: Amount = key(10, "linear, from lr / warmup_steps")
    schedule: Literal["constant", "linear", "cosine"] = key("constant", "after the warm-up, to the last step")
    min_lr_ratio: Share = key(0.1, "where linear and cosine end, as a share of lr")
    grad_clip: Positive = key(1.0, "largest global gradient norm")


@dataclass(frozen=True)
class LogprobGateConfig(Section):
    """Engine against learner: log-probs of tokens made by the very weights that the learner has."""

    max: Positive | None = key(
        None,
        "most that one token may differ; none: 0.01 in float32, 10 in bfloat16 and under generator.quantization",
    )
    mean: Positive | None = key(
        None,
        "most that tokens may differ on average; none: 0.001 in float32, 0.1 in bfloat16 and under "
        "generator.quantization",
    )
    probe: bool = key(
        True, "after each flip generators draw a few tokens for comparison, whatever is being trained on"
    )
    on_mismatch: Literal["stop", "warn"] = key("stop", "warn: log it, and train on")

    def bounds(self, dtype: str, quantized: bool = False) -> tuple[float, float]:
        """(of one token, of the mean), resolved for a model of this dtype."""
        largest, mean = (0.01, 0.001) if dtype == "float32" and not quantized else (10.0, 0.1)
        return self.max or largest, self.mean or mean


@dataclass(frozen=True)
class LearnerConfig(Section):
    processes: Processes = key(
        1, "ranks of all machines together, started by `asyncrl train` or `asyncrl learner`"
    )
    backend: Literal["fsdp", "megatron"] = key(
        "fsdp", "megatron: Megatron-core, on GPUs; see docs/megatron.md"
    )
    own_backend: str | None = key(None, "in place of backend, see docs/learner.md")
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch_tokens: Count = key(16384, "most tokens that one forward/backward of one rank computes")
    mini_batches: Count = key(
        1, "optimizer steps that the groups of one version are split over (PPO mini-batches)"
    )
    epochs: Count = key(1, "passes over the groups of one version")
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    skip_flat_groups: bool = key(
        True,
        "no forward for groups whose advantages are all 0, wherever their gradient is exactly 0 (a version of "
        "such groups alone leaves the optimizer alone)",
    )
    share_prompts: bool = key(
        True,
        "compute a prompt that several rollouts of a micro-batch have only once in each forward; not with "
        "parallel.context_way=all_gather",
    )
    on_bad_step: Literal["stop", "skip"] = key(
        "stop", "a gradient that is not finite; skip: drop the step's groups"
    )
    on_bad_batch: Literal["stop", "skip"] = key(
        "stop",
        "groups whose log-probs, columns or loss are not finite; skip: drop them as not_finite and train on "
        "others, as if they had not been there",
    )
    reduce_gradients: Literal["micro_batch", "step"] = key(
        "micro_batch",
        "when ranks sum their gradients. step: once, after all micro-batches: less traffic, and 4 bytes for each "
        "parameter more on every rank",
    )
    activation_checkpointing: Literal["none", "layers"] = key(
        "none",
        "layers: keep each decoder layer's input alone and compute the rest again in the backward pass: less "
        "memory, a third more work",
    )
    attention: Literal["auto", "flash"] = key(
        "auto",
        "auto: flash-attn where it is installed, on a GPU in half precision, else torch's own; flash: refuse to start "
        "without it",
    )
    compile: bool = key(False, "torch.compile each decoder layer")
    offload: Literal["none", "optimizer", "disk"] = key(
        "none",
        "where the optimizer's state waits between steps. optimizer: in host memory (GPU); disk: in files of "
        "offload_folder",
    )
    offload_folder: str | None = key(None, "of every machine of the learner, best on an NVMe disk of its own")
    peak_tflops: Positive | None = key(
        None, "of one device, for the share perf/learner/mfu; none: measured at the start"
    )
    logprob_gate: LogprobGateConfig = field(default_factory=LogprobGateConfig)
    threads: Threads | None = key(
        None, "CPU threads of one process; none: cores shared out over the run's processes"
    )
    devices: str | None = key(None, "CUDA_VISIBLE_DEVICES of the learner pool; none: as the shell has it")
    gpu_memory_share: Share = key(
        1.0, "most that a rank allocates of its GPU; below 1 where vLLM is there too"
    )
    profile_versions: tuple[int, ...] | None = key(
        None,
        "[first, last]: torch.profiler records each rank's steps to these versions into profile/, as Chrome traces",
    )
    groups_deadline_s: Seconds = key(
        600.0,
        "longest wait for the next group, or for progress of generators, before the run is called stuck",
    )

    @property
    def shares(self) -> bool:
        """Whether forwards compute repeated prompts once."""
        whole = self.parallel.context == 1 or self.parallel.context_way == "ulysses"
        return self.share_prompts and self.own_backend is None and whole

    def rules(self, at: str) -> Iterator[Rule]:
        yield from device_rules(at, self.devices)
        window = self.profile_versions
        yield Rule(
            window is None or (len(window) == 2 and 1 <= window[0] <= window[1]),
            "profile_versions",
            "is no first and last version",
            "set learner.profile_versions=[5,7]",
            window and list(window),
        )
        ranks_on = len(self.devices.split(",")) if self.devices else self.processes
        yield Rule(
            self.processes <= ranks_on,
            "processes",
            f"is more than learner.devices={self.devices} has GPUs, and each process needs one of its own",
            f"set learner.processes={ranks_on}, or name more GPUs",
        )
        yield Rule(
            not self.compile or self.parallel.tensor == 1,
            "compile",
            "does not go with layers whose matrices are shared",
            "leave it out, or set learner.parallel.tensor=1",
        )
        yield Rule(
            (self.offload == "disk") == (self.offload_folder is not None),
            "offload_folder",
            f"goes with learner.offload=disk and no other, and this is {self.offload}",
            "set both, or neither",
        )
        yield Rule(
            self.reduce_gradients == "micro_batch" or self.parallel.pipeline == 1,
            "reduce_gradients",
            "does not go with pipeline stages, which sum once for all micro-batches of a schedule",
            "leave it out, or set learner.parallel.pipeline=1",
        )
        own = {
            "compile": False,
            "offload": "none",
            "reduce_gradients": "micro_batch",
        }
        for name in (name for name, off in own.items() if getattr(self, name) != off):
            yield Rule(
                self.backend == "fsdp",
                name,
                f"is not what learner.backend={self.backend} does",
                "leave it out, or set learner.backend=fsdp",
            )
