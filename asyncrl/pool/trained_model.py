"""A model of a pool that learns. Its learner calls it on all ranks at once (`training_server.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.learner import checkpoint
from asyncrl.learner.backends import storage
from asyncrl.learner.ranks import process_group
from asyncrl.learner.remote import remote_protocol
from asyncrl.learner.remote.remote_protocol import BEGIN, FORGET, LEARN, NORM, SAVE, STEP
from asyncrl.learner.training.objectives import auxiliary_objective
from asyncrl.learner.training.passes import Passes
from asyncrl.pool.model import PoolModel

NAME = re.compile(r"v\d{6,}|\.v\d{6,}\.partial")
"""The name of a checkpoint, whole or being written."""


class TrainedModel(PoolModel):
    """One that learns. Its further jobs are the calls of `remote_protocol.py` with their arguments; LEARN has
    the batches too. An error is the same on all ranks and ends them, unless it is about a folder."""

    def __init__(self, name: str, config: Config) -> None:
        torch.manual_seed(config.run.seed)
        super().__init__(name, config)
        self._objective = auxiliary_objective(name, config)
        self._checkpoints = Path(config.run.dir) / config.run.name / checkpoint.FOLDER
        self._changed = False  # since the beginning of a run
        self._jobs |= {
            BEGIN: self._begin,
            LEARN: self._learn,
            NORM: lambda arguments: self._model.gradient_norm(arguments["scale"]),
            STEP: self._step,
            FORGET: lambda arguments: self._model.forget_gradients(),
            SAVE: self._save,
        }

    @property
    def reads(self) -> Sequence[str]:
        """The columns of its objective."""
        return self._objective.reads

    def _begin(self, arguments: Mapping[str, Any]) -> str:
        """Load the checkpoint of this name; None: begin anew. Returns the reason why it failed, or an empty text."""
        name = arguments["checkpoint"]
        if self._changed and name is None:
            del self._model  # not two of them at once
            self._model, self._changed = self._load_initial(), False
        self._model.forget_gradients()
        return "" if name is None else _failure_of(lambda: self._load(self._folder(name)))

    def _load(self, folder: Path) -> None:
        require(
            folder.is_dir(),
            "run.resume",
            str(folder.parent),
            f"this checkpoint has no folder {folder.name!r}: it was made with the {self.name} somewhere else, or the "
            "pool does not see the folder of the run",
            f"set {self.config.placement.key_of(self.name)}.where=colocated, or let all machines share run.dir",
        )
        self._changed = True
        storage.load(folder, {self.name: self._model.state()})
        self._model.write_parameters()

    def _learn(self, arguments: Mapping[str, Any]) -> list[Any]:
        """The results of the batches, in their order. Each rank takes every world-th batch; all run as many passes."""
        batches, rank, world = arguments["batches"], self.rank, self.world
        mine = [remote_protocol.decode_batch(frames, self.reads) for frames in batches[rank::world]]
        passes = -(-len(batches) // world)
        found = Passes(self._model, self._objective, mine, passes, arguments["version"]).results()
        every = process_group.exchange([each.to_wire() for each in found])
        return [every[i % world][i // world] for i in range(len(batches))]

    def _step(self, arguments: Mapping[str, Any]) -> float:
        self._changed = True
        return self._model.optimizer_step(arguments["scale"], arguments["lr"])

    def _save(self, arguments: Mapping[str, Any]) -> str:
        """Returns the reason why it failed, or an empty text."""
        state = storage.state_of({self.name: self._model.state()})
        return _failure_of(lambda: storage.save_state(self._folder(arguments["folder"]), state))

    def _folder(self, checkpoint_name: str) -> Path:
        """This model's folder in a checkpoint. Raises ValueError for a malformed name."""
        if not NAME.fullmatch(checkpoint_name):
            raise ValueError(f"{checkpoint_name!r} is not the name of a checkpoint")
        return self._checkpoints / checkpoint_name / self.name


def _failure_of(work: Callable[[], None]) -> str:
    """The text of an error about the folder that the work uses; empty if there is none."""
    try:
        work()
    except (ConfigError, OSError, ValueError) as error:
        return str(error)
    return ""
