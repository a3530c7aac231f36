"""Scores of the model on the held-out tasks of `evaluation.source`.

all ranks   their parts of the tasks ─▸ outputs without gradient ─▸ objective ─▸ eval/loss, and of pairs eval/accuracy
rank 0      answers, where there is a reward (`Evaluator`)       ─▸ rewards   ─▸ eval/accuracy, eval/pass@8, …
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from asyncrl.config.schema import Config
from asyncrl.config.sections.tasks import MAIN
from asyncrl.evaluate import Evaluator
from asyncrl.learner.algorithms.losses.aggregation import Counts
from asyncrl.learner.backends.backend import Backend, exchange_per_data_rank
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.lora import ADAPTER
from asyncrl.learner.reporting.heldout import PREFIX, of_group, scores
from asyncrl.learner.training.experience import Experience
from asyncrl.learner.training.passes import Objective
from asyncrl.telemetry.metrics import Metrics

TRAINING = "train/"
"""Begins the objective's own metrics; of held-out tasks they begin with PREFIX."""


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """Collective. batches: this rank's part of the held-out examples; the same number of them on every rank"""

    backend: Backend
    experience: Experience
    objective: Objective
    batches: Sequence[MicroBatch | None]

    def scores(self) -> dict[str, float]:
        """The scores over all ranks' tasks; empty without tasks."""
        total, counts, metrics = 0.0, Counts(), Metrics()
        for batch in self.batches:
            out_N = self.experience.predict({"now": self.backend.policy.predict}, batch)["now"]
            if batch is not None:
                loss, measured = self.objective(batch, out_N)
                total, counts = total + float(loss), counts + self.objective.counts(batch)
                metrics.merge([measured])
        every = exchange_per_data_rank(self.backend, [total, astuple(counts), metrics.to_wire()])
        counts = sum((Counts(*theirs) for _, theirs, _ in every), Counts())
        if not counts.rollouts:
            return {}
        merged = Metrics.of(Metrics.from_wire(theirs) for *_, theirs in every)
        found = {f"{PREFIX}{name.removeprefix(TRAINING)}": value for name, value in merged.values().items()}
        loss_sum = sum(theirs for theirs, *_ in every)
        return found | {f"{PREFIX}loss": loss_sum / self.objective.denominator(counts)}


class Answers:
    """Collective: answers of the policy to the held-out tasks, and their rewards, on rank 0. A context manager.

    folder: where the ranks put together what rank 0 answers with
    """

    def __init__(self, config: Config, backend: Backend, folder: Path) -> None:
        self._config, self._backend, self._folder = config, backend, folder
        self._opened = ExitStack()
        self._evaluator: Evaluator | None = None

    def __enter__(self) -> Answers:
        if self._backend.rank == 0:
            self._evaluator = self._opened.enter_context(Evaluator(self._config))
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def scores(self) -> dict[str, float]:
        """eval/…, on rank 0; nothing on the others."""
        weights = self._weights()
        if self._evaluator is None:
            return {}
        chosen = self._config.evaluation.named_sets[MAIN]
        group = self._evaluator.held_out(weights)
        found = scores(*of_group(group, chosen.samples), chosen.pass_reward)
        return {f"{PREFIX}{name}": value for name, value in found.items()}

    def _weights(self) -> Mapping[str, Any]:
        """Whole tensors, by the names of `Backend.layout`. Those of several ranks are put together on the disk."""
        if self._backend.world == 1:
            return self._backend.local_tensors()
        self._backend.export_hf(self._folder)
        found: dict[str, Any] = {}
        if self._backend.rank == 0:
            where = self._folder / ADAPTER if self._config.model.lora.travels else self._folder
            for file in sorted(where.glob("*.safetensors")):
                found |= load_file(file)
            shutil.rmtree(self._folder)
        return found


def answered(config: Config) -> bool:
    """Whether held-out tasks have a reward that answers can get."""
    return config.evaluation.source is not None and bool(config.reward.functions or config.reward.function)
