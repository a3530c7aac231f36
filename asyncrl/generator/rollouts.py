"""From a task to a scored group: prompt to ids, ids to samples, samples to text, text to reward.

    sample   task ──▸ engine ──▸ n rollouts, and a greedy one where the algorithm compares with it
    score    rollouts ──▸ text ──▸ reward function ──▸ Group: rewards, their parts, steps

If one sample fails, its whole task fails; in an evaluation the sample counts as 0.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from asyncrl.config.rules import require
from asyncrl.config.schema import Config, GeneratorConfig
from asyncrl.config.sections.tasks import MAIN, EvaluationSet
from asyncrl.generator.agents.agent import EnvironmentFailedError
from asyncrl.generator.agents.task_progress import LARGEST_VOCABULARY, Keep, TaskProgress
from asyncrl.generator.engines.engine import (
    PromptTooLongError,
    RequestFailedError,
    Sampler,
    SampleRequest,
    StoppingSampler,
)
from asyncrl.generator.gateway.harness import load_player
from asyncrl.generator.long_answers import LongAnswers, name_of
from asyncrl.generator.scoring.reward_calls import all_of
from asyncrl.generator.scoring.rewards import RewardError, Scorer
from asyncrl.generator.scoring.scores import Score
from asyncrl.generator.scoring.steps import step_columns, token_ends
from asyncrl.generator.threads import in_thread
from asyncrl.models.prompts import ImageReader, encode_prompt, images_in
from asyncrl.types import ANSWER, UNSCORED, Array, Group, Prompt, Rollout, Sampling, Task, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Played:
    """A rollout before it is scored. text: the policy's last turn, which the reward function gets.

    With several turns, `rollout` has a step for each, and the rewards of its environment.
    """

    rollout: Rollout
    text: str


@dataclass(frozen=True, slots=True)
class Samples:
    """The rollouts of one task. greedy: the others are compared with its reward; it is not trained on."""

    played: list[Played]
    greedy: Played | None = None


class Rollouts:
    """Makes and scores the rollouts of tasks. It has an attribute for each setting that a task needs.

    training: the sampling of training rollouts

    vocabulary: of the model; what is kept of a task with other tokens is not used
    """

    def __init__(
        self,
        engine: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        scorer: Scorer,
        config: Config,
        vocabulary: int = LARGEST_VOCABULARY,
    ) -> None:
        engine = StoppingSampler(engine, self._text)
        self._engine, self._tokenizer, self._scorer = engine, tokenizer, scorer
        self._vocabulary = vocabulary
        self._images = ImageReader(config.model, config.generator.engine)
        self._harness = config.agent.harness
        self._agent = load_player(engine, tokenizer, config)
        self._keeps, self._weights = config.agent.keep, config.reward.weights
        self._group_size, self._with_greedy = config.batch.group_size, config.greedy_rollout
        self.training = _sampling(config.generator, config)
        self._evaluations = {
            name: (_sampling(chosen, config), chosen.samples)
            for name, chosen in {MAIN: config.evaluation, **config.evaluation.named_sets}.items()
        }
        generator = config.generator
        self._long_answers = LongAnswers(engine, generator.progress_tokens, generator.max_length)
        self._max_prompt_tokens = config.tasks.max_prompt_tokens
        variables = config.tasks.chat_template_kwargs
        self._encode = partial(encode_prompt, tokenizer, variables=variables)

    async def sample(
        self, task: Task, request_id: str, kept: Sequence[bytes] = (), keep: Keep | None = None
    ) -> Samples:
        """batch.group_size rollouts, and a greedy one if `config.greedy_rollout`.

        kept: what earlier leases made · keep: gets finished turns, and pieces of long answers. Raises
        PromptTooLongError, EnvironmentFailedError or RequestFailedError if the task is to be dropped.
        """
        if self._agent is None or self._max_prompt_tokens is not None:
            self._check_length(prompt := await self._prompt(task))
        greedy = replace(self.training, temperature=0.0)
        if self._agent is not None:
            samplings = [self.training] * self._group_size + [greedy] * self._with_greedy
            played = await self._play(task, request_id, samplings, kept, keep if self._keeps else None)
        else:
            samplings_of_turns = [(self.training, self._group_size), (greedy, int(self._with_greedy))]
            played = await self._answers(task, prompt, request_id, samplings_of_turns, kept, keep)
        return Samples(played, played.pop() if self._with_greedy else None)

    async def score(self, task: Task, samples: Samples) -> Group:
        """The group of these samples.

        Raises RewardError if the reward of one fails, or if only some of them have steps.
        """
        every = [*samples.played] if samples.greedy is None else [*samples.played, samples.greedy]
        scores = await self._scores(task, every)
        rollouts = [self._scored(task, *of) for of in zip(every, scores, strict=True)]
        greedy_reward = None if samples.greedy is None else rollouts.pop().reward
        if len({"step" in rollout.columns for rollout in rollouts}) > 1:
            raise RewardError(
                f"the reward of task {task.ordinal} gave steps for some rollouts and not for others"
            )
        return Group.from_rollouts(task, self.training, rollouts, greedy_reward)

    async def evaluate(
        self, task: Task, held_out: Sequence[Task], request_id: str, name: str = MAIN
    ) -> Group:
        """The samples of held-out tasks, task by task, as the group of `task`. name: of their set.

        Tasks that cannot be answered or scored count as 0, with a warning and the part UNSCORED: an accuracy over
        fewer tasks would be another number. The part ANSWER shows which samples of a task agree, if the reward
        function returns answers.
        """
        sampling, samples = self._evaluations[name]
        several = await all_of(
            self._evaluated(one, f"{request_id}/{one.ordinal}", sampling, samples) for one in held_out
        )
        return Group.from_rollouts(task, sampling, [one for rollouts in several for one in rollouts])

    async def answer(self, task: Task, request_id: str) -> str:
        """The text of one sample as in training. Raises PromptTooLongError."""
        (played,) = await self._played(task, request_id, self.training, 1)
        return played.text

    async def close(self) -> None:
        """End the player of rollouts of several turns."""
        if self._agent is not None:
            await self._agent.close()

    def stats(self) -> dict[str, float]:
        """See `Scorer.stats` and `Agent.stats`."""
        return {**self._scorer.stats(), **(self._agent.stats() if self._agent is not None else {})}

    async def _prompt(self, task: Task) -> Prompt:
        """Raises as `encode_prompt` and `ImageReader.prompt`."""
        ids = self._encode(task)
        if not _images_of(task):
            return Prompt(ids)
        prompt: Prompt = await in_thread(self._images.prompt, task, ids)
        return prompt

    def _check_length(self, prompt: Prompt) -> None:
        most, length = self._max_prompt_tokens, len(prompt.ids)
        if most is not None and length > most:
            raise PromptTooLongError(
                f"a prompt of {length} tokens is longer than tasks.max_prompt_tokens={most}"
            )

    async def _scores(self, task: Task, played: Sequence[Played]) -> list[Score]:
        return await self._scorer.score_group(
            task, [one.text for one in played], [one.rollout for one in played]
        )

    async def _played(self, task: Task, request_id: str, sampling: Sampling, n: int) -> list[Played]:
        if self._agent is not None:
            return await self._play(task, request_id, [sampling] * n)
        return await self._sample_turn(task, await self._prompt(task), request_id, sampling, n)

    async def _sample_turn(
        self, task: Task, prompt: Prompt, request_id: str, sampling: Sampling, n: int
    ) -> list[Played]:
        """n rollouts of one turn."""
        request = SampleRequest(request_id, prompt.ids, sampling, task.ordinal, n, media=prompt.media)
        return [self._of_one_turn(turn, prompt) for turn in await self._engine.sample(request)]

    async def _answers(
        self,
        task: Task,
        prompt: Prompt,
        request_id: str,
        samplings: Sequence[tuple[Sampling, int]],
        kept: Sequence[bytes],
        keep: Keep | None,
    ) -> list[Played]:
        """Rollouts of one turn: so many of each sampling."""
        wanted = [(sampling, count) for sampling, count in samplings if count]
        if keep is None or not self._long_answers.every:
            several = await all_of(
                self._sample_turn(task, prompt, name_of(request_id, sampling), sampling, count)
                for sampling, count in wanted
            )
            return [one for each in several for one in each]
        count = sum(count for _, count in wanted)
        with TaskProgress(count, kept, keep, self._vocabulary) as progress:
            turns = await self._long_answers.sample(task, request_id, prompt, wanted, progress)
        return [self._of_one_turn(turn, prompt) for turn in turns]

    def _of_one_turn(self, turn: Turn, prompt: Prompt) -> Played:
        return Played(Rollout.from_turn(turn, prompt.media), self._text(turn.output_ids))

    async def _play(
        self,
        task: Task,
        request_id: str,
        samplings: Sequence[Sampling],
        kept: Sequence[bytes] = (),
        keep: Keep | None = None,
    ) -> list[Played]:
        """Rollouts of several turns, one for each of `samplings`. Raises ConfigError for a program whose task has
        images, which the APIs that it speaks do not carry."""
        assert self._agent is not None
        require(
            self._harness is None or not _images_of(task),
            "agent",
            self._harness,
            f"task {task.ordinal} has images, which the requests of programs may not have",
            "use agent.environment, or tasks without images",
        )
        play: Callable[..., Awaitable[Any]] = self._agent.play
        count = len(samplings)
        with TaskProgress(count, kept, keep, self._vocabulary, self._agent.kind) as progress:
            made = await all_of(
                play(
                    task,
                    request_id,
                    sampling,
                    sample=i,
                    of=count,
                    trajectory=one,
                    changed=progress.changed,
                    grown=None if keep is None else progress.grown,
                )
                for i, (sampling, one) in enumerate(zip(samplings, progress.trajectories, strict=True))
            )
        return [Played(one.rollout(self._weights), self._text(one.last_words)) for one in made]

    async def _evaluated(
        self, task: Task, request_id: str, sampling: Sampling, samples: int
    ) -> list[Rollout]:
        try:
            played = await self._played(task, request_id, sampling, samples)
        except (PromptTooLongError, EnvironmentFailedError, RequestFailedError) as error:
            log.warning("held-out task %d counts as 0: %s", task.ordinal, error)
            prompt_ids = (await self._prompt(task)).ids
            nothing = SampleRequest(request_id, prompt_ids, sampling, task.ordinal).turn((), (), (), "length")
            return [_unscored(Rollout.from_turn(nothing))] * samples
        try:
            scores = await self._scores(task, played)
            rollouts = [
                replace(self._scored(task, one, replace(score, steps=None)).without_steps(), media=())
                for one, score in zip(played, scores, strict=True)
            ]
        except RewardError as error:
            log.warning("held-out task %d counts as 0: %s", task.ordinal, error)
            return [_unscored(one.rollout) for one in played]
        return _with_answers(rollouts, [score.answer for score in scores])

    def _scored(self, task: Task, played: Played, score: Score) -> Rollout:
        """The rollout with its reward, and the columns of steps if the reward function returns steps."""
        rollout, columns = played.rollout, played.rollout.columns
        if twice := rollout.reward_parts.keys() & score.parts.keys():
            raise RewardError(
                f"task {task.ordinal}: reward function and environment both give {sorted(twice)}"
            )
        if score.steps is not None:
            if columns:
                raise RewardError(
                    f"task {task.ordinal}: the steps of a rollout of several turns are its turns"
                )
            ends_T = token_ends(self._text, rollout.token_ids[rollout.loss_mask != 0], played.text)
            columns = step_columns(score.steps, played.text, ends_T, len(rollout.token_ids))
        return replace(
            rollout,
            reward=rollout.reward + score.reward,
            reward_parts={**rollout.reward_parts, **score.parts},
            columns=columns,
        )

    def _text(self, ids: Array) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _sampling(chosen: GeneratorConfig | EvaluationSet, config: Config) -> Sampling:
    return Sampling(
        temperature=chosen.temperature,
        max_tokens=chosen.max_tokens or config.generator.max_tokens,
        seed=config.run.seed,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=chosen.min_p,
        stop=tuple(config.generator.stop if chosen.stop is None else chosen.stop),
    )


def _images_of(task: Task) -> list[Any]:
    return [] if isinstance(task.prompt, str) else images_in(task.prompt)


def _unscored(rollout: Rollout) -> Rollout:
    return replace(rollout.without_steps(), reward=0.0, reward_parts={UNSCORED: 1.0}, media=())


def _with_answers(rollouts: list[Rollout], answers: Sequence[str | None]) -> list[Rollout]:
    """The rollouts with the part ANSWER, if there is an answer."""
    if not any(answers):
        return rollouts
    return [
        replace(rollout, reward_parts={**rollout.reward_parts, ANSWER: number})
        for rollout, number in zip(rollouts, answer_numbers(answers), strict=True)
    ]


def answer_numbers(answers: Sequence[str | None]) -> list[float]:
    """The part ANSWER of the rollouts of one task.

    >>> answer_numbers(["7", None, "8", "7"])
    [1.0, 0.0, 2.0, 1.0]
    """
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(filter(None, answers)), start=1)}
    return [float(numbers.get(answer or "", 0)) for answer in answers]
