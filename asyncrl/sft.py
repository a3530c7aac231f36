"""Supervised warm-up: teach a model the 'target' texts of the training tasks before reinforcement learning.

    tasks ─▸ prompt + target + end token ─▸ pack ─▸ forward ─▸ −Σ log-prob of the target ─▸ optimizer step
                                                                    every `sft.every` steps: held-out accuracy

The step is the learner's own (`learner/fsdp.py`), with every advantage 1.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from asyncrl.config.schema import Config, OptimizerConfig
from asyncrl.errors import ConfigError, TaskError
from asyncrl.evaluate import Evaluator
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.fsdp import FsdpBackend
from asyncrl.learner.packing import pack
from asyncrl.learner.schedule import learning_rate
from asyncrl.models import encode_prompt, load_tokenizer
from asyncrl.tasks.source import TaskStream, train_stream
from asyncrl.types import Group, Rollout, Sampling, Task, Turn

log = logging.getLogger(__name__)


def run(config: Config) -> dict[str, Any]:
    """Train to `sft.until_accuracy` or `sft.steps`, write the model to `sft.output`; say what was reached.

    Raises ConfigError if an accuracy is asked for without held-out tasks, TaskError for a task without a target.
    """
    sft = config.sft
    if sft.until_accuracy is not None and config.evaluation.source is None:
        raise ConfigError(
            "sft.until_accuracy",
            sft.until_accuracy,
            "needs held-out tasks",
            "set evaluation.source, or sft.steps alone",
        )
    torch.manual_seed(config.run.seed)
    optimizer = OptimizerConfig(lr=sft.lr, warmup_steps=sft.warmup_steps)
    backend = FsdpBackend(config.model, optimizer, config.run.seed)
    batches = supervised_batches(train_stream(config), load_tokenizer(config.model), sft.batch_size)
    started, accuracy, steps = time.monotonic(), None, 0
    with Evaluator(config) as evaluator:
        while steps < sft.steps:
            loss = _step(backend, next(batches), config, learning_rate(steps, sft.steps, optimizer))
            steps += 1
            if evaluator.tasks and (steps % sft.every == 0 or steps == sft.steps):
                accuracy = float(evaluator.held_out(backend.local_tensors()).rewards.mean())
                print(f"sft step {steps}: loss {loss:.3f}, held-out accuracy {accuracy:.3f}", flush=True)
                if sft.until_accuracy is not None and accuracy >= sft.until_accuracy:
                    break
    backend.export_hf(Path(sft.output))
    seconds = time.monotonic() - started
    print(f"sft: {steps} steps in {seconds:.0f} s, written to {sft.output}", flush=True)
    return {"steps": steps, "accuracy": accuracy, "seconds": seconds, "output": sft.output}


def supervised_batches(
    stream: TaskStream, tokenizer: PreTrainedTokenizerBase, size: int
) -> Iterator[MicroBatch]:
    """`size` examples a batch, in the stream's order, for as long as it lasts."""
    ordinal = 0
    while True:
        tasks = [stream.task_at(ordinal + i) for i in range(size)]
        yield MicroBatch.of([_example(task, tokenizer) for task in tasks])
        ordinal += size


def _example(task: Task, tokenizer: PreTrainedTokenizerBase) -> Group:
    """The task's target as if the policy had said it: a group of one."""
    target = task.data.get("target")
    if not isinstance(target, str):
        raise TaskError(f"task {task.ordinal} has no 'target' text, which supervised training needs")
    target_ids = [*tokenizer.encode(target, add_special_tokens=False), tokenizer.eos_token_id]
    turn = Turn(
        prompt_ids=encode_prompt(tokenizer, task.prompt),
        output_ids=np.asarray(target_ids, np.int64),
        logprobs=np.zeros(len(target_ids), np.float32),
        versions=np.zeros(len(target_ids), np.int32),
        finish="stop",
    )
    return Group.from_rollouts(task, Sampling(), [Rollout.from_turn(turn)])


def _step(backend: FsdpBackend, batch: MicroBatch, config: Config, lr: float) -> float:
    """One optimizer step on the mean over target tokens of −log π. Returns that mean."""
    total = 0.0
    everyone: Sequence[int] = range(batch.rollouts)
    for part in pack(batch, everyone, config.learner.micro_batch_tokens):
        _, logp_N, _ = backend.forward(part)
        loss = -logp_N.sum()
        backend.backward(loss)
        total += float(loss.detach())
    tokens = int(batch.loss_mask_N.sum())
    backend.optimizer_step(1.0 / tokens, lr)
    return total / tokens
