"""A pool's model that learns. Its learner calls it on all ranks at once (`training_server.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.schema import Config
from asyncrl.config.sections.rules import require
from asyncrl.errors import ConfigError
from asyncrl.learner import checkpoint, ranks
from asyncrl.learner.backends import storage
from asyncrl.learner.remote import remote_protocol
from asyncrl.learner.remote.remote_protocol import BEGIN, FORGET, LEARN, NORM, SAVE, STEP
from asyncrl.learner.training.passes import run_passes
from asyncrl.learner.training.trainables import objective_beside
from asyncrl.pool.model import PoolModel

NAME = re.compile(r"v\d{6,}|\.v\d{6,}\.partial")
"""Of a checkpoint, whole or being written."""


class TrainedModel(PoolModel):
    """One of `roles.LEARNING`. Beside the jobs of an inference model it runs the calls of `remote_protocol.py`, with
    their arguments; LEARN has the batches too. An error is the same on all ranks and ends them, unless it is about a
    folder."""

    def __init__(self, name: str, config: Config) -> None:
        torch.manual_seed(config.run.seed)
        super().__init__(name, config)
        self._objective = objective_beside(name, config)
        self._checkpoints = Path(config.run.dir) / config.run.name / checkpoint.FOLDER
        self._moved = False  # from what it is at the beginning of a run
        self._jobs |= {
            BEGIN: self._begin,
            LEARN: self._learn,
            NORM: lambda said: self._model.gradient_norm(said["scale"]),
            STEP: self._step,
            FORGET: lambda said: self._model.forget_gradients(),
            SAVE: self._save,
        }

    @property
    def reads(self) -> Sequence[str]:
        """Columns of the batches that it learns from."""
        return self._objective.reads

    def _begin(self, said: Mapping[str, Any]) -> str:
        """As the checkpoint of this name has it; None: as at the beginning of a run. Returns why not."""
        name = said["checkpoint"]
        if self._moved and name is None:
            del self._model  # not two of them at once
            self._model, self._moved = self._made(), False
        self._model.forget_gradients()
        return "" if name is None else _why_not(lambda: self._load(self._folder(name)))

    def _load(self, folder: Path) -> None:
        require(
            folder.is_dir(),
            "run.resume",
            str(folder.parent),
            f"this checkpoint has no folder {folder.name!r}: it was made with the {self.name} somewhere else, or the "
            "pool does not see the folder of the run",
            f"set placement.{self.name}.where=colocated, or let all machines share run.dir",
        )
        self._moved = True
        storage.load(folder, {self.name: self._model.state()})
        self._model.publish_masters()

    def _learn(self, said: Mapping[str, Any]) -> list[Any]:
        """What each batch has found, in their order. Each rank takes every world-th; they run equally many passes."""
        batches, rank, world = said["batches"], self.ranks.rank, self.ranks.world
        mine = [remote_protocol.decode_batch(frames, self.reads) for frames in batches[rank::world]]
        passes = -(-len(batches) // world)
        found = run_passes(self._model, self._objective, mine, passes, said["version"])
        wires = [each.to_wire() for each in found]
        every = [wires] if world == 1 else ranks.exchange(wires)
        return [every[i % world][i // world] for i in range(len(batches))]

    def _step(self, said: Mapping[str, Any]) -> float:
        self._moved = True
        return self._model.optimizer_step(said["scale"], said["lr"])

    def _save(self, said: Mapping[str, Any]) -> str:
        """Returns why not."""
        state = storage.state_of({self.name: self._model.state()})
        return _why_not(lambda: storage.save(self._folder(said["folder"]), state))

    def _folder(self, checkpoint_name: str) -> Path:
        """This model's in a checkpoint. Raises ValueError for a name that is none."""
        if not NAME.fullmatch(checkpoint_name):
            raise ValueError(f"{checkpoint_name!r} is no checkpoint of a run")
        return self._checkpoints / checkpoint_name / self.name


def _why_not(work: Callable[[], None]) -> str:
    """What is wrong with the folder that it works on; empty if nothing is."""
    try:
        work()
    except (ConfigError, OSError, ValueError) as error:
        return str(error)
    return ""
