"""From a checkpoint of a run to a folder that plain transformers loads: in one process, on the CPU.

    RUN/checkpoints/v000050/learner ── the policy's masters ──▸ an FSDP backend of one rank ── as final/ is made ──▸ DIR

Whatever the mesh that saved it: torch.distributed.checkpoint reads the pieces that a tensor is made of. Moments,
critics and the random state are not read. Memory: the model in model.dtype and, if that is half precision, in float32.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import torch

from asyncrl.config.schema import Config, LearnerConfig
from asyncrl.config.sections.rules import require
from asyncrl.learner import checkpoint
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.types import Version


def export(config: Config, run_folder: Path, output: Path, version: Version | None = None) -> Version:
    """Write the policy of a version, of the newest whole checkpoint unless given, as `final/` has it; which version.

    config: what the run was started with · output: whole or not there. Raises ConfigError if there is no such
    checkpoint, if it is not one of this model, or if output holds something.
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
    backend = FsdpBackend(_of_one_process(config), device=torch.device("cpu"))
    backend.load_policy(saved / checkpoint.STATE)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    backend.export_hf(partial)
    os.replace(partial, output)
    return found


def _of_one_process(config: Config) -> Config:
    """The same policy, on a learner that is as plain as can be."""
    return dataclasses.replace(config, learner=LearnerConfig(optimizer=config.learner.optimizer))
