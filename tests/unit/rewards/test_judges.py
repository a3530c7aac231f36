"""Judges behind a real endpoint on loopback: verdicts, faults, the cache, the budget, and texts that want to be judged
well."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from judge_stand_in import JudgeStandIn, materials
from pages import blocks

from asyncrl.config.schema import RewardConfig
from asyncrl.errors import ConfigError, RewardFailedError
from asyncrl.generator.scoring.reward_calls import load_reward
from asyncrl.generator.scoring.rewards import RewardError, Scorer
from asyncrl.rewards import PairwiseJudge, RubricJudge, judge_endpoint
from asyncrl.rewards.judge_folder import Budget, ReplyCache
from asyncrl.rewards.judges import MARK, between_lines, last_object
from asyncrl.types import Rollout, Task

NONE = np.zeros(0)
ROLLOUT = Rollout(NONE, NONE, NONE, NONE, "stop")
TASK = Task(0, "Say something kind.", {"gold": "You are welcome.", "rubric": {"kind": "It is kind."}})
CRITERIA = {"kind": {"text": "It is kind.", "weight": 3}, "short": "It is short."}

Started = Callable[..., Awaitable[tuple[JudgeStandIn, dict[str, Any]]]]


@pytest.fixture
async def started(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Started]:
    """started(reply, *faults, **options) → a judging endpoint, and the options that name it."""
    monkeypatch.setattr(judge_endpoint, "PAUSES_S", (0.001, 0.002))
    running: list[JudgeStandIn] = []

    async def start(reply: Any, *faults: str, **options: Any) -> tuple[JudgeStandIn, dict[str, Any]]:
        running.append(JudgeStandIn(reply, [*faults]))
        return running[-1], {"url": await running[-1].start(), "model": "judge", **options}

    yield start
    for stand_in in running:
        await stand_in.close()


def rubric(system: str, shown: str) -> str:
    """10 for each criterion that the answer names, and 5 for others."""
    answer = materials(shown)["answer"]
    return "So: " + json.dumps({name: 10 if name in answer else 5 for name in ("kind", "short")})


def longer(system: str, shown: str) -> str:
    found = materials(shown)
    a, b = len(found["answer A"]), len(found["answer B"])
    return json.dumps({"better": "tie" if a == b else "A" if a > b else "B"})


# ---- verdicts


async def test_a_rubric_is_the_weighted_mean_of_its_criteria(started: Started) -> None:
    stand_in, endpoint = await started(rubric, extra={"seed": 7})
    judge = RubricJudge(endpoint, CRITERIA, answer="gold")
    assert await judge(TASK, "kind words") == {"kind": 3 / 4, "short": 0.5 / 4}
    (request,) = stand_in.requests
    assert (request["model"], request["temperature"], request["seed"]) == ("judge", 0, 7)
    system, shown = (message["content"] for message in request["messages"])
    assert "- kind: It is kind." in system
    assert '{"kind": 0, "short": 0}' in system
    assert materials(shown) == {
        "task": TASK.prompt,
        "reference answer": "You are welcome.",
        "answer": "kind words",
    }


async def test_a_task_may_have_a_rubric_of_its_own(started: Started) -> None:
    _, endpoint = await started(lambda system, shown: 'first {"kind": 1}, no: {"kind": 2.5}')
    assert await RubricJudge(endpoint, "rubric", most=5)(TASK, "so") == 0.5


@pytest.mark.parametrize(
    ("opponents", "rates", "requests"),
    [
        # Lengths 1, 4, 2, 3: each pair is won by the longer text.
        (None, [0, 1, 1 / 3, 2 / 3], 12),
        # In a circle: 1-4, 4-2, 2-3, 3-1.
        (2, [0, 1, 0, 1], 8),
    ],
)
async def test_win_rates(started: Started, opponents: int | None, rates: list[float], requests: int) -> None:
    stand_in, endpoint = await started(longer)
    judge = PairwiseJudge(endpoint, opponents=opponents)
    assert await judge(TASK, ["a", "bbbb", "cc", "ddd"]) == pytest.approx(rates)
    assert len(stand_in.requests) == requests


async def test_a_judge_that_prefers_a_place_makes_ties(started: Started) -> None:
    _, endpoint = await started(lambda system, shown: '{"better": "A"}')
    assert await PairwiseJudge(endpoint)(TASK, ["a", "bb", "ccc"]) == [0.5, 0.5, 0.5]


async def test_equal_texts_tie_without_the_judge(started: Started) -> None:
    stand_in, endpoint = await started(longer)
    judge = PairwiseJudge(endpoint)
    assert await judge(TASK, ["a"]) == [0.5]
    # a-a tie, a-b lost, a-b lost
    assert await judge(TASK, ["a", "a", "bb"]) == [0.25, 0.25, 1.0]
    assert len(stand_in.requests) == 4


# ---- texts that want to be judged well


@given(st.text("<|>/[]INST_a -\n｜"))
def test_a_text_breaks_no_line_and_makes_no_mark(text: str) -> None:
    shown = between_lines("answer", text)
    first, *_, last = shown.split("\n")
    assert first.removesuffix("begins") == last.removesuffix("ends")
    assert first not in text
    assert not MARK.search(shown)


@pytest.mark.parametrize(
    "token", ["<|im_end|>", "</s>", "<start_of_turn>", "[/INST]", "<｜User｜>", "<<SYS>>"]
)
def test_tokens_of_chat_templates_are_broken(token: str) -> None:
    assert token not in between_lines("answer", f"so{token}{token}")
    assert "a[0] < b and c > [1, 2]" in between_lines("answer", "a[0] < b and c > [1, 2]")


@pytest.mark.parametrize("reply", ["", "{", '{"kind": 3}', '{"kind": 1, "short": 2, "more": 3}', "{" * 3000])
def test_a_reply_without_its_object_is_no_verdict(reply: str) -> None:
    with pytest.raises(ValueError, match="no JSON object with kind, short"):
        last_object(reply, ["kind", "short"])


@pytest.mark.parametrize("number", ["11", "-1", "true", '"9"', "NaN", "null"])
async def test_a_number_beyond_the_scale_is_no_verdict(started: Started, number: str) -> None:
    stand_in, endpoint = await started(lambda system, shown: f'{{"kind": {number}}}', retries=1)
    with pytest.raises(Exception, match="no number from 0 to 10"):
        await RubricJudge(endpoint, "rubric")(TASK, "so")
    assert len(stand_in.requests) == 2


# ---- faults


async def test_faults_are_tried_again(started: Started) -> None:
    stand_in, endpoint = await started(rubric, "500", "429", "garbage", "hang", retries=4, deadline_s=0.5)
    assert await RubricJudge(endpoint, CRITERIA)(TASK, "kind") == {"kind": 3 / 4, "short": 0.5 / 4}
    assert len(stand_in.requests) == 5


async def test_a_refusal_is_not_tried_again(started: Started) -> None:
    stand_in, endpoint = await started(rubric, "401")
    with pytest.raises(Exception, match="status 401"):
        await RubricJudge(endpoint, CRITERIA)(TASK, "kind")
    assert len(stand_in.requests) == 1


async def test_what_fails_for_good_follows_on_failure(started: Started) -> None:
    _, endpoint = await started(lambda system, shown: "no", retries=0)
    options = {"endpoint": endpoint, "criteria": CRITERIA}
    config = RewardConfig(function="asyncrl.rewards:RubricJudge", options=options, retries=0)
    with pytest.raises(RewardError, match="no JSON object with kind, short"):
        await Scorer.from_config(config).score(TASK, "so", ROLLOUT)
    zero = RewardConfig(function=config.function, options=options, retries=0, on_failure="zero")
    assert (await Scorer.from_config(zero).score(TASK, "so", ROLLOUT)).reward == 0


async def test_the_key_is_sent_and_never_shown(
    started: Started, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    stand_in, endpoint = await started(rubric, "redirect", "500", key_variable="JUDGE_KEY", retries=0)
    options = {"endpoint": endpoint, "criteria": CRITERIA}
    scorer = Scorer.from_config(
        RewardConfig(function="asyncrl.rewards:RubricJudge", options=options, retries=1)
    )
    with caplog.at_level(logging.DEBUG), pytest.raises(RewardError) as raised:
        await scorer.score(TASK, "so", ROLLOUT)
    assert stand_in.keys == ["Bearer sk-secret"] * 2  # a redirect is not followed
    assert "sk-secret" not in caplog.text + str(raised.value)


async def test_no_more_requests_at_once_than_allowed(started: Started) -> None:
    stand_in, endpoint = await started(longer, concurrency=2)
    await PairwiseJudge(endpoint)(TASK, ["a", "bb", "ccc", "dddd"])
    assert (len(stand_in.requests), stand_in.most_at_once) == (12, 2)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"endpoint": {"model": "judge"}}, "endpoint.url"),
        (
            {"endpoint": {"url": "http://x", "model": "judge", "key_variable": "NOT_SET"}},
            "endpoint.key_variable",
        ),
        ({"endpoint": {"url": "http://x", "model": "judge", "retires": 1}}, "endpoint.retires"),
        ({"criteria": {}}, "criteria"),
        ({"criteria": {"kind": {"text": "It is kind.", "weight": 0}}}, "criteria.kind"),
        ({"most": 0}, "most"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], key: str) -> None:
    known = {"endpoint": {"url": "http://x", "model": "judge"}, "criteria": CRITERIA}
    config = RewardConfig(function="asyncrl.rewards:RubricJudge", options=known | options)
    with pytest.raises(ConfigError) as raised:
        load_reward(config, "reward")
    assert raised.value.key == f"reward.options.{key}"


def test_the_judges_of_the_page_can_be_made() -> None:
    (page,) = [block for block in blocks("docs/rewards.md", "yaml") if "Judge" in block]
    config = RewardConfig(**yaml.safe_load(page)["reward"])
    assert {RubricJudge, PairwiseJudge} < {
        type(load_reward(config.of(name), name)) for name in config.functions
    }


# ---- the folder


async def test_replies_outlive_their_process_and_equal_requests_are_one(
    started: Started, tmp_path: Path
) -> None:
    stand_in, endpoint = await started(rubric, folder=str(tmp_path))
    scores = await asyncio.gather(*[RubricJudge(endpoint, CRITERIA)(TASK, "kind") for _ in range(2)])
    judge = RubricJudge(endpoint, CRITERIA)  # as after a restart
    scores += await asyncio.gather(*[judge(TASK, "kind") for _ in range(5)])
    assert len({json.dumps(score) for score in scores}) == 1
    assert len(stand_in.requests) <= 2
    await judge(TASK, "other")
    assert materials(stand_in.requests[-1]["messages"][1]["content"])["answer"] == "other"
    made = len(stand_in.requests)
    fresh = RubricJudge(endpoint, CRITERIA)
    await asyncio.gather(*[fresh(TASK, "new") for _ in range(5)])
    assert len(stand_in.requests) == made + 1


async def test_a_reply_that_no_longer_fits_is_requested_again(started: Started, tmp_path: Path) -> None:
    stand_in, endpoint = await started(rubric, folder=str(tmp_path))
    await RubricJudge(endpoint, CRITERIA)(TASK, "kind")
    (kept,) = (tmp_path / "replies").iterdir()
    kept.write_text("torn")
    await RubricJudge(endpoint, CRITERIA)(TASK, "kind")
    assert len(stand_in.requests) == 2
    assert kept.read_text() != "torn"


def test_the_replies_that_were_not_used_for_longest_go_first(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path, 1000)
    for name in "abcdefghi":
        cache.put(name, name * 100)
        cache.get("a")
    cache.put("j", "j" * 200)  # 1100 bytes: two go, so that 900 are left
    left = {path.name for path in (tmp_path / "replies").iterdir()}
    assert left == {*"adefghij"}


@pytest.mark.parametrize("tokens", [-1_000_000, 10**99, float("inf"), float("nan"), True, "7", {}])
async def test_a_count_that_cannot_be_is_not_believed(started: Started, tmp_path: Path, tokens: Any) -> None:
    stand_in, endpoint = await started(rubric, folder=str(tmp_path))
    stand_in.tokens = tokens
    await RubricJudge(endpoint, CRITERIA)(TASK, "hi")
    assert 1 < Budget(tmp_path).add()["tokens"] < judge_endpoint.MOST_TOKENS


def test_a_folder_that_cannot_be_written_costs_no_reward(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "replies").write_text("a file")
    cache = ReplyCache(tmp_path, 1000)
    cache.put("a", "reply")
    assert cache.get("a") is None
    assert "is not kept" in caplog.text


@pytest.mark.parametrize(("limit", "calls"), [({"max_calls": 3}, 3), ({"max_total_tokens": 150}, 2)])
async def test_a_spent_budget_ends_with_what_was_chosen(
    started: Started, tmp_path: Path, limit: dict[str, int], calls: int
) -> None:
    stand_in, endpoint = await started(rubric, folder=str(tmp_path), concurrency=1, **limit)
    (name,) = limit
    options = {"endpoint": endpoint, "criteria": CRITERIA}

    def scorer(**more: str) -> Scorer:
        made = {**options, "endpoint": {**endpoint, **more}}
        return Scorer.from_config(RewardConfig(function="asyncrl.rewards:RubricJudge", options=made))

    first = scorer()
    for number in range(calls):
        await first.score(TASK, str(number), ROLLOUT)
    for spent in (first, scorer()):  # the second one is of another process
        with pytest.raises(RewardError, match=f"endpoint.{name}={limit[name]} of judge is spent"):
            await spent.score(TASK, "one more", ROLLOUT)
    with pytest.raises(RewardFailedError, match=r"is spent\. Remedy"):
        await scorer(on_spent="stop").score(TASK, "one more", ROLLOUT)
    assert len(stand_in.requests) == calls
    assert Budget(tmp_path).add() == {"calls": calls, "tokens": 100 * calls}
    await first.score(TASK, "0", ROLLOUT)  # known replies cost nothing
