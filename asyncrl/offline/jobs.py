"""The three jobs: the rows that each learns from, its network, its objective, and the configuration of its run."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from asyncrl.config.rules import require
from asyncrl.config.schema import Config, CriticConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.models import ModelConfig, ScoringModelConfig
from asyncrl.config.sections.offline import OfflineConfig
from asyncrl.errors import SourceEndedError, TaskError
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.training.passes import Objective
from asyncrl.models.loading import load_model_config
from asyncrl.models.prompts import ImageReader, policy_tokenizer
from asyncrl.offline.batches import steps_and_tasks
from asyncrl.offline.examples import Examples, check_demonstrated, check_pair, one_by_one
from asyncrl.offline.heldout import answered
from asyncrl.offline.objectives import TARGET, ImitationObjective, PreferenceObjective, with_signs
from asyncrl.tasks.source import every_task, load_source, training_tasks
from asyncrl.tasks.stream import TaskStream
from asyncrl.types import Rollout, Task


class Job(ABC):
    """verb: of the command line · section: of the configuration · network: the kind of network"""

    verb: ClassVar[str]
    section: ClassVar[str]
    network: ClassVar[type[ModelConfig]] = ModelConfig

    def chosen(self, config: Config) -> OfflineConfig:
        found: OfflineConfig = getattr(config, self.section)
        return found

    @abstractmethod
    def check(self, config: Config) -> None:
        """Raises ConfigError for keys that do not go together in this job."""

    @abstractmethod
    def check_row(self, task: Task, config: Config) -> None:
        """Raises TaskError for a row that this job cannot learn from."""

    @abstractmethod
    def example(self, task: Task, examples: Examples) -> Rollout: ...

    @abstractmethod
    def objective(self, config: Config) -> Objective: ...

    def finished(self, batch: MicroBatch, config: Config) -> MicroBatch:
        """The batch with what the objective reads."""
        return batch

    def answers(self, config: Config) -> bool:
        """Whether held-out tasks are answered, too."""
        return False

    def plays(self, config: Config) -> bool:
        """Whether examples are played in the environment of the run."""
        return False

    def has_reference(self, config: Config) -> bool:
        """Whether the objective compares with the policy as the job begins with it."""
        return False


class Sft(Job):
    verb, section = "sft", "sft"

    def check(self, config: Config) -> None:
        until, remedy = (
            config.sft.until_accuracy,
            "set evaluation.source and reward.function, or sft.steps alone",
        )
        require(
            until is None or answered(config), "sft.until_accuracy", until, "needs held-out tasks", remedy
        )

    def check_row(self, task: Task, config: Config) -> None:
        check_demonstrated(task, config.agent.several_turns)

    def example(self, task: Task, examples: Examples) -> Rollout:
        return examples.demonstrated(task)

    def objective(self, config: Config) -> Objective:
        return ImitationObjective()

    def answers(self, config: Config) -> bool:
        return answered(config)

    def plays(self, config: Config) -> bool:
        return config.agent.several_turns


class RewardModelTraining(Job):
    verb, section, network = "reward-model", "reward_model_training", ScoringModelConfig

    def check(self, config: Config) -> None:
        learner = config.learner
        rule = "trains policies and critics, and no classifier"
        require(
            learner.backend == "fsdp", "learner.backend", learner.backend, rule, "set learner.backend=fsdp"
        )
        stages, rule = learner.parallel.pipeline, "cuts networks whose last stage predicts tokens"
        remedy = "set learner.parallel.pipeline=1"
        require(stages == 1, "learner.parallel.pipeline", stages, rule, remedy)

    def check_row(self, task: Task, config: Config) -> None:
        check_pair(task)

    def example(self, task: Task, examples: Examples) -> Rollout:
        return examples.compared(task)

    def objective(self, config: Config) -> Objective:
        return PreferenceObjective()

    def finished(self, batch: MicroBatch, config: Config) -> MicroBatch:
        return with_signs(batch)


class Dpo(Job):
    verb, section = "dpo", "dpo"

    def check(self, config: Config) -> None:
        return

    def check_row(self, task: Task, config: Config) -> None:
        check_pair(task)

    def example(self, task: Task, examples: Examples) -> Rollout:
        return examples.preferred(task)

    def objective(self, config: Config) -> Objective:
        dpo = config.dpo
        return PreferenceObjective(dpo.beta, dpo.label_smoothing, "ipo" if dpo.loss == "ipo" else "logistic")

    def finished(self, batch: MicroBatch, config: Config) -> MicroBatch:
        if self.has_reference(config):
            return with_signs(batch)
        target_R = torch.full((batch.rollouts,), config.dpo.target_margin / config.dpo.beta)
        return dataclasses.replace(with_signs(batch, mean=True), parts_R={TARGET: target_R})

    def has_reference(self, config: Config) -> bool:
        return config.dpo.loss != "simpo"


SFT, REWARD_MODEL, DPO = Sft(), RewardModelTraining(), Dpo()


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedJob:
    """config: of the run, with a version for each optimizer step · tasks: of all steps, None without a limit
    held_out: the rows of evaluation.source; None without any, and where examples are played"""

    job: Job
    config: Config
    examples: Examples
    stream: TaskStream
    tasks: int | None
    held_out: TaskStream | None

    @property
    def trained(self) -> Config:
        """The configuration of the networks."""
        model = self.config.model
        fields: dict[str, Any] = {one.name: getattr(model, one.name) for one in dataclasses.fields(model)}
        return dataclasses.replace(self.config, model=self.job.network(**fields))

    def tasks_to_come(self) -> Iterator[Task]:
        """Each task of the job, those of later epochs once."""
        most = self.config.run.versions * self.job.chosen(self.config).batch_size
        for ordinal in range(min(most, self.tasks or most, self.stream.size or most)):
            try:
                yield self.stream.task_at(ordinal)
            except SourceEndedError:
                return

    def held_out_tasks(self) -> list[Task]:
        """Those that the job can learn from: tasks for supervised training may have rewards alone."""
        tasks = every_task(self.held_out) if self.held_out else []
        return [task for task in tasks if self._learns_from(task)]

    def _learns_from(self, task: Task) -> bool:
        try:
            self.job.check_row(task, self.config)
        except TaskError:
            return False
        return True


def planned(job: Job, config: Config) -> PlannedJob:
    """Check the job, the model's files, and the rows: the first one, of a .jsonl file all. Raises ConfigError,
    TaskError."""
    job.check(config)
    load_model_config(config.model)
    examples = Examples(policy_tokenizer(config), ImageReader(config.model), config)

    def check_row(task: Task) -> None:
        job.check_row(task, config)

    stream, held_out = training_tasks(config, check_row), None
    if config.evaluation.source is not None and not job.plays(config):
        check = None if job.answers(config) else check_row
        held_out = load_source(config.evaluation, section="evaluation", check=check)
    if not job.plays(config):
        one_by_one(partial(job.example, examples=examples), stream.place_of)([stream.task_at(0)])
    chosen = job.chosen(config)
    steps, tasks = steps_and_tasks(chosen, stream.size, job.section)
    ending = f"-{job.verb}"
    run = dataclasses.replace(
        config.run, name=config.run.name.removesuffix(ending) + ending, versions=steps, target_accuracy=None
    )
    generator = dataclasses.replace(config.generator, top_p=1.0, top_k=0, min_p=0.0)
    made = dataclasses.replace(
        config,
        run=run,
        learner=dataclasses.replace(config.learner, optimizer=chosen.optimizer, mini_batches=1, epochs=1),
        generator=generator,  # of the rules for these and the algorithm
        critic=CriticConfig(),  # and its rules for the number of versions
        # No advantage is computed; this one has no rules for the size of a group.
        algorithm=AlgorithmConfig(advantage="reinforce_pp", loss="reinforce", aggregation="token-mean"),
    )
    return PlannedJob(job, made, examples, stream, tasks, held_out)
