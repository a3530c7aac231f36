"""From a checkpoint of a run to a folder that plain transformers loads: in one process, on the CPU.

    RUN/checkpoints/v000050/learner ── the policy's masters ──▸ an FSDP backend of one rank ── as final/ is made ──▸ DIR

Any mesh may have saved it: torch.distributed.checkpoint reads the pieces of each tensor. Moments, critics and the
random state are not read. Memory: the model in model.dtype and, if that is half precision, in float32.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import torch

from asyncrl.config.rules import require
from asyncrl.config.schema import Config, LearnerConfig
from asyncrl.learner import checkpoint
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.types import Version


def export(config: Config, run_folder: Path, output: Path, version: Version | None = None) -> Version:
    """Write the policy of a version, the newest saved one unless given, as a folder like `final/`. Returns the version.

    The folder appears whole or not at all. Raises ConfigError if there is no such checkpoint, it is of another model,
    or `output` is not empty.
    """
    saved = checkpoint.of_version(run_folder, version)
    found = checkpoint.read_meta(saved).version
    require(
        not output.exists() or (output.is_dir() and not any(output.iterdir())),
        "DIR",
        str(output),
        "holds something already",
        "name a folder that is not there yet",
    )
    backend = FsdpBackend(_single_process(config), device=torch.device("cpu"))
    backend.load_policy(saved / checkpoint.STATE)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    backend.export_hf(partial)
    os.replace(partial, output)
    return found


def _single_process(config: Config) -> Config:
    """The same policy, with default learner settings."""
    return dataclasses.replace(config, learner=LearnerConfig(optimizer=config.learner.optimizer))
