"""Groups that no correct worker makes: each fault by hand, and any mixture of them in front of a real learner."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import random_group, small_config
from trainer_cases import Case, FakeQueue

from asyncrl.config.schema import Config, LearnerConfig, RewardConfig, RunConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig, ShapingConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.learner.checks.group_check import Fault, GroupCheck
from asyncrl.types import COLUMNS, Group, Sampling

CHECK = GroupCheck(rollouts=4, longest=16, vocabulary=33, truncated=False, segments=3)
Change = Callable[[Group], Group]


def at(name: str, where: int, value: Any) -> Change:
    """Change one value of a column of the group. where: -1 for its last token, a policy token."""

    def change(group: Group) -> Group:
        if name in group.columns:
            column = group.columns[name].copy()
            column[where] = value
            return dataclasses.replace(group, columns={**group.columns, name: column})
        column = getattr(group, name).copy()
        column[where] = value
        return dataclasses.replace(group, **{name: column})

    return change


def with_(**fields: Any) -> Change:
    return lambda group: dataclasses.replace(group, **fields)


def column(name: str, dtype: str, value: Any, missing: int = 0) -> Change:
    """Add a column of one value, by so many values too short."""
    return lambda group: dataclasses.replace(
        group, columns={**group.columns, name: np.full(group.tokens - missing, value).astype(dtype)}
    )


def segmented(*numbers: int) -> Change:
    """Of the first rollout: the last number for all tokens that are left."""

    def change(group: Group) -> Group:
        every = np.zeros(group.tokens, np.int32)
        every[: len(numbers)] = numbers
        every[len(numbers) : group.lengths[0]] = numbers[-1]
        return dataclasses.replace(group, columns={**group.columns, "segment": every})

    return change


def part(value: float) -> Change:
    return lambda group: dataclasses.replace(
        group, reward_parts={"p": np.full(len(group.lengths), value, np.float32)}
    )


def long_first_rollout(group: Group) -> Group:
    return dataclasses.replace(group, lengths=np.array([group.tokens - 3, 1, 1, 1]))


def without_last_rollout(group: Group) -> Group:
    return dataclasses.replace(group, lengths=group.lengths[:-1], rewards=group.rewards[:-1])


CORRUPT: dict[str, tuple[Change, str]] = {
    "fewer rollouts": (without_last_rollout, "it has 3 rollouts, and batch.group_size=4"),
    "an empty rollout": (at("lengths", 0, 0), "a rollout has 0 tokens"),
    "a long segment": (long_first_rollout, "a segment has 31 tokens, and generator.max_length=16"),
    "a short column": (
        lambda group: dataclasses.replace(group, logprobs=group.logprobs[1:]),
        "logprobs has the shape",
    ),
    "a short column of a pool": (column("step", "int32", 0, missing=1), "column 'step' has the shape"),
    "few rewards": (lambda group: dataclasses.replace(group, rewards=group.rewards[1:]), "rewards has the shape"),
    "greedy": (with_(sampling=Sampling(temperature=0.0)), "it was sampled at temperature 0"),
    "cold": (with_(sampling=Sampling(temperature=1e-30)), "it was sampled at temperature 1e-30"),
    "no temperature": (with_(sampling=Sampling(temperature=np.nan)), "it was sampled at temperature nan"),
    "a cut support": (with_(sampling=Sampling(top_k=3)), "its support was cut, and algorithm.truncated=refuse"),
    "a token too many": (at("token_ids", 0, 33), "token 33 is none of the 33"),
    "a negative token": (at("token_ids", -1, -1), "token -1 is none of the 33"),
    "a mask of 2": (at("loss_mask", -1, 2), "its loss mask is neither 0 nor 1"),
    "a mask on the first token": (at("loss_mask", 0, 1), "first token has a loss mask, but nothing predicts it"),
    "a mask on a later first token": (
        lambda group: at("loss_mask", int(group.lengths[0]), 1)(group),
        "first token has a loss mask",
    ),
    "a token of no version": (at("versions", -1, -1), "a policy token has the version -1"),
    "a version to come": (at("versions", -1, 10**9), "a token has the version 1000000000, the newest is 5"),
    "a version before all": (at("versions", 0, -2), "a token has the version -2"),
    "an impossible log-prob": (at("logprobs", -1, -81.0), "a policy token has the log-prob -81"),
    "a log-prob above 0": (at("logprobs", -1, 2.0), "a policy token has the log-prob 2"),
    "a huge reward": (at("rewards", 0, -2e12), "rewards has a value above 1e+12"),
    "a huge part": (part(3e38), "reward part 'p' has a value above 1e+12"),
    "a huge reward of the greedy rollout": (with_(greedy_reward=1e300), "the reward of its greedy rollout is 1e+300"),
    "a column of nobody": (column("values", "float32", 0), "it has a column 'values', which no pool of this run adds"),
    "a column of another type": (column("step", "float32", 0), "column 'step' is of float32"),
    "a step before all": (column("step", "int32", -2), "a token belongs to step -2"),
    "a huge reward of a step": (column("step_rewards", "float32", 1e13), "'step_rewards' has a value above 1e+12"),
    "a first segment of 1": (column("segment", "int32", 1), "the segments of a rollout are not numbered 0, 1"),
    "a segment left out": (segmented(0, 2), "the segments of a rollout are not numbered 0, 1"),
    "segments that fall": (segmented(0, 1, 0), "the segments of a rollout are not numbered 0, 1"),
    "many segments": (segmented(0, 1, 2, 3), "a rollout has 4 segments, and at most 3 are possible"),
    "a policy token that begins a segment": (
        lambda group: at("loss_mask", 1, 1)(segmented(0, 1)(group)),
        "a segment's first token has a loss mask, but nothing predicts it",
    ),
}  # fmt: skip

NOT_FINITE: dict[str, tuple[Change, str]] = {
    "log-prob": (at("logprobs", -1, np.nan), "a value of logprobs"),
    "reward": (at("rewards", 0, np.inf), "a value of rewards"),
    "part": (part(np.nan), "a value of reward part 'p'"),
    "step's reward": (column("step_rewards", "float32", -np.inf), "a value of step_rewards"),
}


def test_the_teachers_most_likely_tokens_are_tokens_of_the_policy() -> None:
    """Its column of a pool: the token's log-prob, those of two tokens and of all others, these tokens."""
    check = dataclasses.replace(CHECK, columns=frozenset({"teacher"}), likeliest=(2, 40))
    row = np.array([-1.0, -0.5, -2.0, -3.0, 39, 0], np.float32)

    def fault(*changed: float, width: int = 6) -> str:
        group = random_group(7)
        column_NW = np.tile(row[:width], (group.tokens, 1))
        column_NW[-1, width - len(changed) :] = changed
        found = check.fault(dataclasses.replace(group, columns={"teacher": column_NW}), 5)
        return found.text if found else ""

    assert fault() == ""
    for wrong in (40, -1, 0.5, np.nan, np.inf):
        assert fault(wrong) == f"a most likely token of the teacher is {wrong:g}, none of the policy's 40"
    assert fault(0) == ""
    assert fault(5, 5) == "two of the teacher's most likely tokens are the same"
    assert "the teacher gives the log-prob 60, which is above" in fault(60.0, 39, 0)
    assert "column 'teacher' has the shape" in fault(width=5)
    assert CHECK.fault(random_group(7), 5) is None


@pytest.mark.parametrize("name", CORRUPT)
def test_a_corrupt_group_is_named(name: str) -> None:
    change, text = CORRUPT[name]
    assert CHECK.fault(random_group(7), 5) is None
    fault = CHECK.fault(change(random_group(7)), 5)
    assert fault is not None
    assert (fault.ordinal, fault.reason) == (7, "corrupt")
    assert text in fault.text


@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_value_that_is_not_finite_is_a_fault_where_such_groups_are_skipped(name: str) -> None:
    change, text = NOT_FINITE[name]
    group = change(random_group(7))
    assert CHECK.fault(group, 5) is None
    skipping = dataclasses.replace(CHECK, skip=True)
    assert skipping.fault(random_group(7), 5) is None
    assert skipping.fault(group, 5) == Fault(7, "not_finite", f"{text} is not finite")


def test_segments_are_long_one_by_one() -> None:
    whole = segmented(0, 1)(random_group(7))
    longest = int(whole.segment_lengths.max())
    assert dataclasses.replace(CHECK, longest=longest).fault(whole, 5) is None
    assert dataclasses.replace(CHECK, longest=longest - 1).fault(whole, 5) is not None
    assert dataclasses.replace(CHECK, segments=1).fault(whole, 5) is not None


def test_no_value_beyond_the_loss_mask_counts() -> None:
    skipping = dataclasses.replace(CHECK, skip=True)
    assert skipping.fault(at("logprobs", 0, np.nan)(random_group(7)), 5) is None
    assert skipping.fault(at("logprobs", 0, -1e30)(random_group(7)), 5) is None


def test_pools_and_the_algorithm_make_requirements_of_their_own() -> None:
    check = dataclasses.replace(CHECK, columns=frozenset({"values"}), greedy=True, published=8)
    whole = column("values", "float32", 0.5)(with_(greedy_reward=1.0)(random_group(7, version=8)))
    assert check.fault(whole, 0) is None
    for change, text in (
        (with_(columns={}), "it lacks the column 'values'"),
        (column("values", "int64", 1), "column 'values' is of int64"),
        (with_(greedy_reward=None), "it lacks the reward of a greedy rollout"),
        (at("versions", -1, 9), "the newest is 8"),
    ):
        fault = check.fault(change(whole), 0)
        assert fault is not None
        assert text in fault.text


# ---- in front of a real learner

numbers = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1e-30, 1e12, -80.0, 88.0]))
integers = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-3, 40))
FIELDS = {
    "token_ids": integers,
    "loss_mask": st.integers(-128, 127),
    "logprobs": numbers,
    "versions": integers,
    "rewards": numbers,
}


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """A change of a group that keeps the sizes which the wire compares."""
    kind = draw(st.sampled_from([*FIELDS, "column", "part", "sampling", "lengths", "task"]))
    if kind in FIELDS:
        where = draw(st.integers(-4, 3))
        return at(kind, where, draw(FIELDS[kind]))
    if kind == "column":
        name = draw(st.sampled_from(sorted(COLUMNS)))
        return column(name, COLUMNS[name], draw(numbers if name == "step_rewards" else integers))
    if kind == "part":
        return part(draw(numbers))
    if kind == "sampling":
        temperature, top_p, top_k = draw(numbers), draw(numbers), draw(integers)
        return with_(sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k))
    if kind == "lengths":
        return moved_to_the_first_rollout
    text = draw(st.one_of(st.text(max_size=3), st.just([{"role": "user", "content": "\ud800"}])))
    return lambda group: dataclasses.replace(group, task=dataclasses.replace(group.task, prompt=text))


def moved_to_the_first_rollout(group: Group) -> Group:
    lengths = np.zeros_like(group.lengths)
    lengths[0] = group.tokens
    return dataclasses.replace(group, lengths=lengths)


def learns_from_what_is_left(config: Config, several: list[list[Change]]) -> None:
    """The first groups are changed. The learner trains a version, whatever they are, and nothing is counted twice."""

    def make(ordinal: int) -> Group:
        group = dataclasses.replace(random_group(ordinal), greedy_reward=0.5)
        if config.algorithm.advantage == "gigpo":
            for name, dtype in (("step", "int32"), ("anchor", "int64"), ("step_rewards", "float32")):
                group = column(name, dtype, 0)(group)
        for change in several[ordinal] if ordinal < len(several) else []:
            group = change(group)
        return group

    case = Case(config, FakeQueue(make=make))
    case.trainer.run()
    assert case.queue.of("trained") == [0]
    dropped = [ordinal for _, ordinals, _ in case.queue.of("abandon") for ordinal in ordinals]
    assert len(set(dropped)) == len(dropped)
    assert {*dropped} <= {*range(len(several))}
    assert np.isfinite(case.publisher.published[1].numpy()).all()


def fuzz(advantage: str, several: list[list[Change]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        learner = LearnerConfig(
            micro_batch_tokens=64,
            on_bad_batch="skip",
            on_bad_step="skip",
            optimizer=OptimizerConfig(lr=1e-2),
            groups_deadline_s=5.0,
        )
        run = RunConfig(name="it", dir=folder, versions=1)
        algorithm = AlgorithmConfig(advantage=advantage, shaping=ShapingConfig(kl_coef=0.1))  # type: ignore[arg-type]
        reward = RewardConfig(weights={"p": 1.0})
        config = small_config(Path(folder), run=run, learner=learner, algorithm=algorithm, reward=reward)
        learns_from_what_is_left(config, several)


some = st.lists(st.lists(changes(), min_size=1, max_size=2), min_size=1, max_size=4)


@settings(max_examples=5, deadline=None)
@given(several=some)
def test_no_group_ends_the_learner(several: list[list[Change]]) -> None:
    fuzz("grpo", several)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["grpo", "gigpo", "remax", "gae"])
@settings(max_examples=20, deadline=None)
@given(several=some)
def test_no_group_ends_a_learner_of_any_kind(advantage: str, several: list[list[Change]]) -> None:
    fuzz(advantage, several)
