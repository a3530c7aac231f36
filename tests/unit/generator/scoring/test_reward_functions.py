"""Several reward functions at once, functions of whole groups, options, classes, and what becomes of failures."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncrl
from asyncrl.config.load import load_config, save_config
from asyncrl.config.schema import Config, RewardConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.scoring.rewards import RewardError, Scorer
from asyncrl.generator.scoring.scores import Score, combined, score_of
from asyncrl.launch import local_run
from asyncrl.telemetry import tracing
from asyncrl.types import Rollout, Scored, Step, Task

TASK = Task(3, "1+1=", {"answer": "2"})
NONE = np.zeros(0)
ROLLOUT = Rollout(NONE, NONE, NONE, NONE, "length")
HERE = Path(__file__)


def by_length(task: Task, text: str, *, per: float = 1.0) -> float:
    return len(text) / per


def best(task: Task, texts: Sequence[str]) -> list[float]:
    longest = max(map(len, texts))
    return [float(len(text) == longest) for text in texts]


class Counting:
    """Made once: counts the calls of all answers."""

    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ConfigError("start", start, "cannot be negative", "set start=0")
        self.calls, self.closed = start, False

    def __call__(self, task: Task, text: str) -> float:
        self.calls += 1
        return float(self.calls)

    def close(self) -> None:
        self.closed = True


async def scores(
    functions: dict[str, Callable[..., Any]], texts: Sequence[str], weights: Any = None, **keys: Any
) -> list[Score]:
    entries = {name: {"function": "unused:unused", **keys.get(name, {})} for name in functions}
    scorer = Scorer(
        functions, RewardConfig(functions=entries, weights=weights or {}, retries=0, deadline_s=5)
    )
    try:
        return await scorer.score_group(TASK, texts, [ROLLOUT] * len(texts))
    finally:
        scorer.close()


# ---- several


async def test_the_reward_is_the_weighted_sum_of_all_functions_and_every_part_is_kept() -> None:
    async def style(task: Task, text: str) -> dict[str, float]:
        return {"short": 2.0, "cost": 5.0}

    weights = {"length": 0.5, "style/cost": 0.0}
    one, other = await scores({"length": by_length, "style": style}, ["abc", "a"], weights)
    assert one == Score(3.5, {"length": 3.0, "style/short": 2.0, "style/cost": 5.0})
    assert (other.reward, other.parts["length"]) == (2.5, 1.0)


async def test_one_that_hangs_holds_up_no_other_and_is_named() -> None:
    called, released = threading.Event(), threading.Event()

    def slow(task: Task, text: str) -> float:
        assert called.wait(20)
        released.wait(20)
        return 1.0

    def quick(task: Task, text: str) -> float:
        called.set()
        return 1.0

    try:
        with pytest.raises(
            RewardError, match=r"the reward 'slow' of task 3 took longer than reward.deadline_s=0.2"
        ):
            await scores({"slow": slow, "quick": quick}, ["a"], slow={"deadline_s": 0.2})
    finally:
        released.set()
    assert called.is_set()


async def test_what_fails_may_count_as_0_and_is_counted() -> None:
    def broken(task: Task, text: str) -> float:
        return 1 / 0 if text == "b" else 1.0

    entries = {
        "length": {"function": "unused:unused"},
        "broken": {"function": "unused:unused", "on_failure": "zero", "retries": 2},
    }
    scorer = Scorer({"length": by_length, "broken": broken}, RewardConfig(functions=entries, retries=0))
    made = await scorer.score_group(TASK, ["a", "b"], [ROLLOUT] * 2)
    assert made == [Score(2.0, {"length": 1.0, "broken": 1.0}), Score(1.0, {"length": 1.0})]
    assert scorer.stats() == {
        "reward/failures": 3,
        "reward/failures/length": 0,
        "reward/failures/broken": 3,
        "reward/zeroed": 1,
        "reward/missed_weights": 0,
    }


async def test_a_failure_drops_the_task_unless_told_otherwise() -> None:
    with pytest.raises(RewardError, match=r"the reward 'broken' of task 3 raised ZeroDivisionError"):
        await scores({"length": by_length, "broken": lambda task, text: 1 / 0}, ["a"])


async def test_only_one_function_may_speak_of_steps() -> None:
    def stepwise(task: Task, text: str) -> Scored:
        return Scored(1.0, [Step(0, 1, reward=0.5)])

    (one,) = await scores({"steps": stepwise, "length": by_length}, ["a"], {"steps/steps": 2.0})
    assert one == Score(3.0, {"steps": 1.0, "steps/steps": 0.5, "length": 1.0}, (Step(0, 1, reward=1.0),))
    with pytest.raises(RewardError, match="task 3: two functions return steps"):
        await scores({"one": stepwise, "two": stepwise}, ["a"])


def test_the_answer_is_that_of_the_first_function_that_has_one() -> None:
    answers = [score_of(Scored(1.0, answer=answer), "", {}, "f") for answer in (None, "a", "b")]
    assert combined(answers).answer == "a"


def test_sums_must_be_finite_too() -> None:
    large = score_of(6e29, "", {}, "a")
    with pytest.raises(ValueError, match="the sum of all functions is not a finite number"):
        combined([large, large])


# ---- whole groups


async def test_a_function_of_a_group_is_called_once_with_all_texts() -> None:
    made = await scores({"best": best, "length": by_length}, ["ab", "abc", "a"], best={"per": "group"})
    assert [score.parts["best"] for score in made] == [0.0, 1.0, 0.0]
    assert [score.reward for score in made] == [2.0, 4.0, 1.0]


async def test_a_function_of_a_group_may_take_the_rollouts() -> None:
    async def ended(task: Task, texts: list[str], rollouts: list[Rollout]) -> list[dict[str, float]]:
        return [{"cut": float(rollout.finish == "length")} for rollout in rollouts]

    scorer = Scorer(ended, RewardConfig(function="unused:unused", per="group"))
    assert await scorer.score_group(TASK, ["a", "b"], [ROLLOUT] * 2) == [Score(1.0, {"cut": 1.0})] * 2
    assert (await scorer.score(TASK, "a", ROLLOUT)).reward == 1.0


async def test_a_value_for_each_text_is_asked_of_it() -> None:
    with pytest.raises(RewardError, match="1 values for 2 texts"):
        await scores({"few": lambda task, texts: [1.0]}, ["a", "b"], few={"per": "group"})


async def test_a_group_that_fails_counts_as_0_as_a_whole() -> None:
    def broken(task: Task, texts: list[str]) -> list[float]:
        raise ConnectionError("judge is away")

    keys = {"broken": {"per": "group", "on_failure": "zero"}}
    made = await scores({"broken": broken, "length": by_length}, ["a", "ab"], **keys)
    assert [score.reward for score in made] == [1.0, 2.0]


def test_a_greedy_rollout_does_not_go_with_functions_of_groups() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.advantage = 'remax'.*per: group"):
        Config(algorithm=AlgorithmConfig(advantage="remax"), reward=RewardConfig(per="group"))


# ---- options


async def test_options_are_keywords_of_a_function() -> None:
    scorer = Scorer.from_config(RewardConfig(function=f"{HERE}:by_length", options={"per": 4}))
    assert (await scorer.score(TASK, "ab", ROLLOUT)).reward == 0.5


async def test_a_class_is_made_once_with_its_options_and_closed() -> None:
    functions = {"count": {"function": f"{HERE}:Counting", "options": {"start": 5}, "workers": 1}}
    scorer = Scorer.from_config(RewardConfig(functions=functions))
    made = await scorer.score_group(TASK, ["a", "b"], [ROLLOUT] * 2)
    assert sorted(score.reward for score in made) == [6.0, 7.0]
    (call,) = scorer._calls
    scorer.close()
    assert call._function.closed


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ({"function": f"{HERE}:by_length", "options": {"pre": 4}}, "reward.functions.x.options"),
        ({"function": f"{HERE}:Counting", "options": {"start": -1}}, "reward.functions.x.options.start"),
        ({"function": "asyncrl.rewards:RegexMatch"}, "reward.functions.x.options"),
        ({"function": f"{HERE}:nothing"}, "reward.functions.x.function"),
        ({"function": f"{HERE}:HERE"}, "reward.functions.x.function"),
        ({"function": "builtins:object"}, "reward.functions.x.function"),
    ],
)
def test_what_cannot_be_made_is_refused_under_its_key(entry: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Scorer.from_config(RewardConfig(functions={"x": entry}))
    assert refusal.value.key == key


# ---- the how-to

DOCS = Path(__file__).parents[4] / "docs" / "rewards.md"


async def test_the_example_of_the_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, functions, *_ = re.findall(r"```(?:yaml|python)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "config.yaml").write_text("model: {path: x}\ntasks: {source: x}\n" + settings)
    (tmp_path / "my_rewards.py").write_text(functions)
    monkeypatch.chdir(tmp_path)
    scorer = Scorer.from_config(load_config("config.yaml").reward)
    try:
        one, other = await scorer.score_group(TASK, ["so 2", "it is 3"], [ROLLOUT] * 2)
    finally:
        scorer.close()
    assert one.parts == {"right": 1.0, "style": 1.0, "rank/place": 0.0, "rank/spread": 3.0}
    assert one.reward == pytest.approx(1.1)
    assert other.reward == pytest.approx(0 + 0.1 + 1)


# ---- the config


BASE = "model: {path: x}\ntasks: {source: x}\nreward:\n  deadline_s: 9\n  functions:\n    right: {function: 'a:b'}\n"


def test_functions_inherit_the_section_and_are_set_one_key_at_a_time(base: Path, tmp_path: Path) -> None:
    words = ["reward.functions.right.options.strict=true", "reward.functions.style.function=c:d"]
    reward = load_config(base, [*words, "reward.functions.style.deadline_s=2", "reward.workers=7"]).reward
    assert reward.function is None
    right, style = reward.each
    assert (right.function, right.deadline_s, right.workers, right.options) == (
        "a:b",
        9.0,
        7,
        {"strict": True},
    )
    assert (style.function, style.deadline_s, style.workers, style.options) == ("c:d", 2, 7, {})
    config = load_config(base, words)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("reward.function=e:f", "reward.function"),
        ("reward.functions.right.weight=2", "reward.functions.right.weight"),
        ("reward.functions.right.deadline_s=soon", "reward.functions.right.deadline_s"),
        ("reward.functions.right.deadline_s=0", "reward.functions.right.deadline_s"),
        ("reward.functions.right.per=word", "reward.functions.right.per"),
        ("reward.functions.right.on_failure=cry", "reward.functions.right.on_failure"),
        ("reward.functions.style.per=group", "reward.functions.style"),
        ("reward.functions.style=c:d", "reward.functions.style"),
        ("reward.functions.a/b.function=c:d", "reward.functions.a/b"),
        ("reward.retries=-1", "reward.retries"),
        ("reward.per=word", "reward.per"),
    ],
)
def test_bad_entries_are_refused_under_their_key(base: Path, word: str, key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(base, [word])
    assert refusal.value.key == key


def test_several_functions_of_a_script(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("asyncrl.launch.preflight.preflight", lambda config: None)
    monkeypatch.setattr(local_run, "train", lambda config: seen.append(config) or {})
    asyncrl.train(base, ["reward.functions.best.per=group"], reward={"right": by_length, "best": best})
    functions = seen[0].reward.functions
    assert functions["right"]["function"].endswith(":by_length")
    assert functions["best"]["per"] == "group"
    with pytest.raises(ConfigError, match=r"reward\['bad'\] = .* cannot be imported by name"):
        asyncrl.train(base, reward={"bad": lambda task, text: 1.0})


async def test_long_calls_are_spans_of_the_trace_and_short_ones_are_not(trace: Any) -> None:
    async def slow(task: Task, text: str) -> float:
        await asyncio.sleep(2 * tracing.SHORT_S)
        return 1.0

    await scores({"slow": slow, "style": AsyncStyle()}, ["a", "b"])
    spans = trace().lanes["reward functions"].spans
    assert [(span.name, span.about) for span in spans if span.name == "slow"] == [("slow", {"task": 3})] * 2
    assert all(span.end - span.start >= tracing.SHORT_S for span in spans)


class AsyncStyle:
    async def __call__(self, task: Task, text: str) -> float:
        return 1.0
