"""Batches, groups and a tiny model that the learner's tests share."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.schema import (
    BatchConfig,
    Config,
    EvaluationConfig,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    QueueConfig,
    RunConfig,
)
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.learner.algorithms.registry import ADVANTAGES, LOSSES
from asyncrl.learner.algorithms.roles import ROLES
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.training.version_step import PreparedClaim
from asyncrl.telemetry.metrics import Metrics
from asyncrl.types import NO_VERSION, Group, Rollout, Sampling, Task, Version

OWN_CRITIC = Path(__file__).parents[3] / "examples" / "own_critic.py"
ORACLE = json.loads((Path(__file__).parents[2] / "data" / "oracle_cases.json").read_text(encoding="utf-8"))

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 33,  # odd, so that it is sharded unevenly
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 19,
    "pad_token_id": 0,
}
"""The configuration of a model of transformers, of most families."""


def flat(matrix: Sequence[Sequence[float]]) -> Tensor:
    """[rollouts][tokens] → N float64 values."""
    return torch.tensor(matrix, dtype=torch.float64).flatten()


def oracle_batch() -> MicroBatch:
    """The oracle's 12 rollouts of 9 tokens; a token's reward counts for its rollout."""
    mask = ORACLE["inputs"]["mask"]
    rollouts, length = len(mask), len(mask[0])
    names = sorted(set(ORACLE["group"]))
    return MicroBatch(
        token_ids_N=torch.zeros(rollouts * length, dtype=torch.int64),
        position_ids_N=torch.arange(length).repeat(rollouts),
        seq_N=torch.arange(rollouts).repeat_interleave(length),
        loss_mask_N=flat(mask).bool(),
        behaviour_N=flat(ORACLE["inputs"]["old_log_prob"]),
        versions_N=torch.zeros(rollouts * length, dtype=torch.int32),
        advantages_N=flat(ORACLE["inputs"]["advantages"]),
        lengths_R=(length,) * rollouts,
        group_R=torch.tensor([names.index(name) for name in ORACLE["group"]]),
        rewards_R=torch.tensor(ORACLE["inputs"]["rewards"]).sum(1),
        greedy_R=torch.full((rollouts,), torch.nan),
        ordinals_R=torch.tensor([names.index(name) for name in ORACLE["group"]]),
        copies_R=torch.ones(rollouts),
        temperature_R=torch.ones(rollouts),
        media_N=torch.full((rollouts * length,), -1, dtype=torch.int32),
    )


def rewards_batch(*groups: Sequence[float]) -> MicroBatch:
    """Rollouts of one prompt and one policy token each, with these rewards."""
    return MicroBatch.of(
        [
            Group.from_rollouts(Task(o, ""), Sampling(), [rollout([1, 2], 1, reward=r) for r in rewards])
            for o, rewards in enumerate(groups)
        ]
    )


def rollout(ids: Sequence[int], prompt: int, reward: float = 0.0, version: int = 0) -> Rollout:
    """`ids`, of which the first `prompt` are no policy tokens; log μ = -1 everywhere."""
    made = len(ids) - prompt
    return Rollout(
        token_ids=np.array(ids, np.int64),
        loss_mask=np.array([0] * prompt + [1] * made, np.int8),
        logprobs=np.array([0.0] * prompt + [-1.0] * made, np.float32),
        versions=np.array([NO_VERSION] * prompt + [version] * made, np.int32),
        finish="stop",
        reward=reward,
    )


def random_group(
    ordinal: int, size: int = 4, seed: int = 0, version: int = 0, spread: bool = True, segments: int = 1
) -> Group:
    """Random tokens below 32, random lengths, the same prompt; without `spread` all rewards are 1. Rollouts have 1 to
    `segments` segments, from the second on one more than the one before."""
    random = np.random.default_rng([seed, ordinal])
    prompt = np.random.default_rng([seed, ordinal, 1]).integers(1, 32, 3).tolist()

    def segment(reward: float) -> Rollout:
        ids = random.integers(1, 32, 3 + int(random.integers(1, 9))).tolist()
        return rollout([*prompt, *ids[3:]], prompt=3, reward=reward, version=version)

    rollouts = [
        Rollout.from_segments([segment(float(i % 2) if spread else 1.0) for _ in range(1 + i % segments)])
        for i in range(size)
    ]
    return Group.from_rollouts(Task(ordinal, "", {}), Sampling(), rollouts)


def packed(groups: Sequence[Group], version: Version) -> PreparedClaim:
    """A claim that is packed and nothing else, for train streams without a version step."""
    return PreparedClaim(MicroBatch.of(groups), False, set(), Metrics())


def tiny_model(folder: Path, tied: bool = True, dtype: str = "float32") -> ModelConfig:
    """A Qwen2-shaped model folder without weights. One that is there already is left alone: ranks share it."""
    from transformers import Qwen2Config

    if (folder / "config.json").exists():
        return ModelConfig(path=str(folder), dtype=dtype)
    Qwen2Config(**TINY, tie_word_embeddings=tied, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return ModelConfig(path=str(folder), dtype=dtype)


def small_config(tmp_path: Path, **sections: Any) -> Config:
    """Two groups of four a version, three versions, all under tmp_path; `sections` replace whole sections."""
    given = {
        "run": RunConfig(name="case", dir=str(tmp_path), versions=3),
        "model": ModelConfig(path=str(tmp_path / "model")),
        "batch": BatchConfig(groups=2, group_size=4),
        # Log-probs that a test makes up are no engine's: nothing compares them with the learner's.
        "generator": GeneratorConfig(engine="scripted", max_length=32, max_tokens=8),
        "queue": QueueConfig(max_staleness=1),
        "evaluation": EvaluationConfig(source="heldout.jsonl", every=2, chunk=2),
        "learner": LearnerConfig(
            micro_batch_tokens=64, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1), groups_deadline_s=5.0
        ),
        "algorithm": AlgorithmConfig(),
    }
    return Config(**(given | sections))


def without_counts(values: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step without those that depend on how rollouts are divided: prompts are shared within a pass."""
    return {name: value for name, value in values.items() if not name.startswith("perf/learner/passed")}


def copied_weights(model: Any) -> dict[str, Tensor]:
    """Of a backend or a model: copies of the parameters that this rank holds."""
    return {name: tensor.clone() for name, tensor in model.local_tensors().items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """The same parameters, bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@contextmanager
def kept_registries() -> Iterator[None]:
    """Without the algorithms and models that a user's files have declared meanwhile: other tests count them."""
    registries: list[dict[str, Any]] = [ADVANTAGES, LOSSES, ROLES]
    loaded, before = set(sys.modules), [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)
    for name in [name for name in set(sys.modules) - loaded if name.startswith("_asyncrl_file_")]:
        del sys.modules[name]


def saved_bytes(backend: Backend) -> int:
    """The most that autograd keeps at once for a backward pass of the policy, parameters aside."""
    every = (held if isinstance(held, list) else [held] for held in backend.local_tensors().values())
    parameters = {view.untyped_storage().data_ptr() for held in every for view in held}
    kept, most = Counter[tuple[int, int]](), 0

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal most
            storage = tensor.untyped_storage()
            self.tensor, self.storage = tensor, (storage.data_ptr(), storage.nbytes())
            kept[self.storage] += self.storage[0] not in parameters
            most = max(most, sum(size for (_, size), times in kept.items() if times))

        def __del__(self) -> None:
            kept[self.storage] -= self.storage[0] not in parameters

    def loss(_: MicroBatch, logp_N: Tensor, *__: Tensor) -> Tensor:
        return logp_N.sum()

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda held: held.tensor):
        backend.policy.accumulate([MicroBatch.of([random_group(0, size=32)])], loss)
    return most
