"""Optimizer state that is kept in host memory or in files while activations need the device's memory.

forward, backward: activations on the device, state elsewhere ─▸ fetch ─▸ optimizer step ─▸ park
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config.rules import require
from asyncrl.config.schema import LearnerConfig
from asyncrl.device import accelerator
from asyncrl.device.parked import ParkedTensors, host_room
from asyncrl.learner.parallel.mesh import local_part


class Offload(NamedTuple):
    """The place of optimizer state between steps: files in a folder, best on a local disk, or host memory (None)."""

    folder: Path | None

    @staticmethod
    def of(config: LearnerConfig, device: torch.device) -> Offload | None:
        """The offload that `learner.offload` requests; None: state stays on the device. Raises ConfigError if the
        folder cannot be written, or the state is in host memory already."""
        if config.offload == "none":
            return None
        if config.offload_folder is not None:
            folder = Path(config.offload_folder)
            require(
                folder.is_dir() and os.access(folder, os.W_OK),
                "learner.offload_folder",
                config.offload_folder,
                "must be a folder of every machine of the learner that it may write to",
                "make it, best on a disk of that machine, or name another one",
            )
            return Offload(folder)
        rule = "moves the optimizer's state from a GPU to host memory, and this learner is on the CPU"
        remedy = "set learner.offload=none, or disk with learner.offload_folder"
        require(accelerator.is_accelerator(device), "learner.offload", config.offload, rule, remedy)
        return Offload(None)


class ParkedState:
    """Moves an optimizer's state back and forth."""

    def __init__(self, optimizer: torch.optim.Optimizer, offload: Offload) -> None:
        folder = offload.folder
        self._optimizer = optimizer
        self._parked = ParkedTensors(host_room if folder is None else partial(in_a_file, folder))

    def park(self) -> None:
        """Move the state away, unless it is parked already. Raises OSError for a full disk."""
        self._parked.park(self._tensors())

    def fetch(self) -> None:
        """Move parked state back to the device, bit for bit."""
        self._parked.fetch()

    @torch.no_grad()
    def _tensors(self) -> Iterator[Tensor]:
        """This rank's part of each tensor of the state, without step counters."""
        for state in self._optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim() > 0:
                    yield local_part(value)


def in_a_file(folder: Path, like: Tensor) -> Tensor:
    """A tensor of this shape and dtype whose memory is a mapped file, which the system writes out when it needs memory.

    The file is unlinked, so its space becomes free however the process ends. All of it is allocated now, because a
    write to mapped memory on a full disk would kill the process: OSError if the disk has no room.
    """
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    with tempfile.NamedTemporaryFile(dir=folder, prefix="asyncrl-optimizer-") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, like.nbytes)
        made = torch.from_file(file.name, shared=True, size=like.numel(), dtype=like.dtype)
    return made.view(like.shape)
