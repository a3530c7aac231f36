"""Reward functions of every kind, and the ones that fail, hang or lie."""

from __future__ import annotations

import asyncio
import re
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from waiting import eventually

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.rules import check_section
from asyncrl.config.schema import RewardConfig
from asyncrl.errors import ConfigError, RewardFailedError
from asyncrl.generator.scoring.reward_calls import FIRST, LATER, LEAST
from asyncrl.generator.scoring.rewards import MISSED_AFTER, RewardError, Scorer
from asyncrl.generator.scoring.scores import Score
from asyncrl.telemetry import tracing
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Rollout, Scored, Step, Task

TASK = Task(3, "1+1=", {"answer": "2"})
NONE = np.zeros(0)
ROLLOUT = Rollout(NONE, NONE, NONE, NONE, "length")


def config(**changes: object) -> RewardConfig:
    return RewardConfig(
        **{"function": "unused:unused", "deadline_s": 5.0, "retries": 1, "workers": 2, **changes}
    )


async def score(function: object, **changes: object) -> Score:
    scorer = Scorer(function, config(**changes))  # type: ignore[arg-type]
    try:
        return await scorer.score(TASK, "2", ROLLOUT)
    finally:
        scorer.close()


async def test_a_plain_function_gives_a_number() -> None:
    assert await score(lambda task, text: text == task.data["answer"]) == Score(1.0, {"reward": 1.0})


async def test_an_async_function_gives_parts() -> None:
    async def reward(task: Task, text: str) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"right": 1, "short": 0.25}

    assert await score(reward) == Score(1.25, {"right": 1.0, "short": 0.25})


async def test_a_function_of_three_gets_the_rollout() -> None:
    scored = await score(lambda task, text, rollout: float(rollout.finish == "length"))
    assert scored.reward == 1.0


async def test_a_failed_call_is_made_again() -> None:
    calls: list[str] = []

    def reward(task: Task, text: str) -> float:
        calls.append(text)
        if len(calls) == 1:
            raise ConnectionError("judge is away")
        return 0.5

    assert (await score(reward)).reward == 0.5
    assert calls == ["2", "2"]


@pytest.mark.parametrize("value", [float("nan"), "much", None, {"a": float("inf")}])
async def test_what_is_no_finite_number_is_a_failure(value: object) -> None:
    with pytest.raises(RewardError, match="task 3"):
        await score(lambda task, text: value)


async def test_the_error_says_what_the_last_call_raised() -> None:
    def reward(task: Task, text: str) -> float:
        raise KeyError("answer")

    with pytest.raises(RewardError, match="task 3 raised KeyError: 'answer'"):
        await score(reward)


@pytest.mark.parametrize(
    ("value", "why"), [(float("nan"), "returned nan: reward is not a finite"), (None, "returned None: ")]
)
async def test_what_was_returned_in_place_of_a_number_is_shown(value: object, why: str) -> None:
    with pytest.raises(RewardError, match=f"task 3 {why}"):
        await score(lambda task, text: value)


def typo(task: Task, text: str) -> float:
    return float(text == task.data["anwser"])


async def fail(scorer: Scorer, ordinals: range, text: str = "no") -> None:
    for ordinal in ordinals:
        with pytest.raises(RewardError):
            await scorer.score(Task(ordinal, "1+1=", {"answer": "2"}), text, ROLLOUT)


@pytest.mark.parametrize("on_failure", ["drop", "zero"])
async def test_a_function_that_fails_at_every_task_ends_the_run(on_failure: str) -> None:
    scorer = Scorer(typo, config(function="bad.py:typo", on_failure=on_failure))
    ending = None
    for ordinal in range(FIRST):
        assert ending is None
        try:
            await scorer.score(Task(ordinal, "1+1=", {"answer": "2"}), "2", ROLLOUT)
        except RewardError:
            assert on_failure == "drop"
        except RewardFailedError as error:
            ending = str(error)
    assert ending is not None
    assert "reward.function = 'bad.py:typo' failed at each of the first 32 tasks" in ending
    assert "the last failure: the reward of task 31 raised KeyError: 'anwser' (test_rewards.py:" in ending


async def test_one_success_makes_failures_rare_and_many_in_a_row_hopeless_again() -> None:
    def reward(task: Task, text: str) -> float:
        return {"2": 1.0}[text]

    scorer = Scorer(reward, config(function="f.py:reward", retries=0, max_failed_share=1.0))
    await fail(scorer, range(FIRST - 1))
    assert (await scorer.score(TASK, "2", ROLLOUT)).reward == 1.0
    await fail(scorer, range(LATER - 1))
    with pytest.raises(RewardFailedError, match=f"of the last {LATER} tasks"):
        await scorer.score(Task(LATER, "1+1=", {}), "no", ROLLOUT)


def every_second(task: Task, text: str) -> float:
    """Of the answers of a task: "no" is a mistake."""
    return {"2": 1.0}[text]


async def group(scorer: Scorer, ordinal: int, texts: list[str]) -> None:
    with suppress(RewardError):
        await scorer.score_group(Task(ordinal, "1+1=", {"answer": "2"}), texts, [ROLLOUT] * len(texts))


async def test_a_task_with_one_failed_answer_is_a_failed_task() -> None:
    """Good calls between the bad ones do not hide that every group is dropped."""
    scorer = Scorer(every_second, config(function="f.py:reward", retries=0))
    for ordinal in range(FIRST - 1):
        await group(scorer, ordinal, ["2", "no"])
    with pytest.raises(RewardFailedError, match="failed at each of the first 32 tasks"):
        await group(scorer, FIRST, ["2", "no"])


async def test_too_large_a_share_of_failed_tasks_ends_the_run() -> None:
    scorer = Scorer(every_second, config(function="f.py:reward", retries=0))
    for ordinal in range(LEAST):  # half of them: as many as may fail
        await group(scorer, ordinal, ["2", "no" if ordinal % 2 else "2"])
    with pytest.raises(RewardFailedError) as ending:
        await group(scorer, LEAST, ["no", "2"])
    text = str(ending.value)
    assert "failed at 33 of the last 65 tasks (51%, more than max_failed_share=0.5)" in text
    assert "task 64 raised KeyError: 'no' (test_rewards.py:" in text
    assert "Remedy: correct the function" in text
    assert "set reward.max_failed_share=1" in text


async def test_answers_that_may_count_as_0_fail_no_task_that_has_good_ones() -> None:
    scorer = Scorer(every_second, config(function="f.py:reward", retries=0, on_failure="zero"))
    for ordinal in range(2 * LATER):
        await group(scorer, ordinal, ["2", "no"])


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"reward.max_failed_share = .* is a share"):
        check_section(config(max_failed_share=share), "reward")


async def test_failures_of_one_task_count_once() -> None:
    scorer = Scorer(typo, config(function="f.py:typo", retries=0))
    for _ in range(2 * FIRST):
        await fail(scorer, range(3, 4))


async def test_the_traceback_of_the_first_failure_of_a_kind_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await fail(Scorer(typo, config(function="f.py:typo")), range(3))
    told = [record for record in caplog.records if record.exc_info]
    assert [record.getMessage() for record in told] == ["f.py:typo at task 0, for the first time:"]
    (exc_info,) = [record.exc_info for record in told]
    assert exc_info is not None
    frames = traceback.extract_tb(exc_info[2])
    assert [frame.name for frame in frames] == ["typo"]  # how asyncrl came to call it is of no use


async def test_calls_that_hang_cost_the_others_nothing() -> None:
    """More calls hang than there are threads; good calls still get one."""
    released = threading.Event()

    def reward(task: Task, text: str) -> float:
        if text == "hang":
            released.wait(60)
        return 1.0

    scorer = Scorer(reward, config(deadline_s=0.05, retries=0, workers=1))
    try:
        for _ in range(3):
            with pytest.raises(RewardError, match="longer than"):
                await scorer.score(TASK, "hang", ROLLOUT)
        assert (await scorer.score(TASK, "fine", ROLLOUT)).reward == 1.0
        assert scorer.stats()["reward/failures"] == 3
    finally:
        released.set()
        scorer.close()


async def test_an_async_function_that_hangs_meets_its_deadline() -> None:
    async def reward(task: Task, text: str) -> float:
        return await asyncio.get_running_loop().create_future()

    with pytest.raises(RewardError, match="longer than"):
        await score(reward, deadline_s=0.05, retries=0)


async def test_more_calls_than_threads_all_get_their_turn() -> None:
    scorer = Scorer(lambda task, text: len(text), config(workers=2))
    texts = ["x" * i for i in range(20)]
    scores = await asyncio.gather(*(scorer.score(TASK, text, ROLLOUT) for text in texts))
    scorer.close()
    assert [score.reward for score in scores] == list(range(20))


async def test_steps_that_do_not_fit_the_text_are_a_failed_call() -> None:
    with pytest.raises(RewardError, match=r"task 3 returned .*: step 0 is \[0, 2\)"):
        await score(lambda task, text: Scored(0.0, [Step(0, 2)]))


async def test_a_weight_whose_part_never_comes_is_counted_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def reward(task: Task, text: str) -> dict[str, float]:
        return {"right": 1.0, "rare": 1.0} if text == "0" else {"right": 1.0}

    status = ProcessStatus()
    scorer = Scorer(reward, config(weights={"rihgt": 2.0, "right": 1.0, "rare": 1.0}))
    scorer.start(status)
    for n in range(2 * MISSED_AFTER):
        await scorer.score(TASK, str(n), ROLLOUT)
    scorer.close()
    (record,) = caplog.records
    assert record.getMessage() == status.warning
    assert status.warning == (
        "reward.weights names rihgt, but 16 answers had no such part; the last one had right"
    )
    assert scorer.stats() == {"reward/failures": 0, "reward/zeroed": 0, "reward/missed_weights": 1}


def test_a_function_of_a_file_is_loaded_without_its_main_part(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text("def good(task, text): return 1.0\nif __name__ == '__main__': raise SystemExit(3)\n")
    function = load_function(f"{file}:good", "reward.function")
    assert function(TASK, "") == 1.0
    assert load_function(f"{file}:good", "reward.function") is function


def test_a_function_of_a_module_is_found() -> None:
    assert load_function("os.path:join", "reward.function")("a", "b") == "a/b"


@pytest.mark.parametrize(
    "spec", ["nowhere", "no.such.module:f", "os.path:no_such", "missing.py:f", "os.path:sep"]
)
def test_a_name_of_nothing_is_refused_under_its_key(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"^reward.function = ") as refusal:
        load_function(spec, "reward.function")
    assert refusal.value.value == spec


@pytest.mark.parametrize("ends", [SystemExit(0), asyncio.CancelledError(), StopIteration()])
async def test_a_function_that_would_end_the_process_has_failed(ends: BaseException) -> None:
    def reward(task: Task, text: str) -> float:
        raise ends

    with pytest.raises(RewardError, match=rf"task 3 raised RuntimeError: {type(ends).__name__}"):
        await score(reward)


@pytest.mark.parametrize("ends", [SystemExit(0), asyncio.CancelledError()])
async def test_an_async_function_that_would_end_the_process_or_cancel_its_caller_has_failed(
    ends: BaseException,
) -> None:
    async def reward(task: Task, text: str) -> float:
        raise ends

    with pytest.raises(RewardError, match=re.escape(f"task 3 raised RuntimeError: {ends!r}")):
        await score(reward)


@pytest.mark.parametrize(("bad", "why"), [("raises", "could not convert"), ("none", "returned None")])
async def test_a_failure_is_known_although_a_call_before_it_hangs(bad: str, why: str) -> None:
    released = threading.Event()

    def reward(task: Task, text: str) -> float | None:
        if text == "hangs":
            released.wait(60)
        return None if text == "none" else float(text)

    scorer = Scorer(reward, config(deadline_s=60.0, retries=0))
    try:
        with pytest.raises(RewardError, match=why):
            await asyncio.wait_for(scorer.score_group(TASK, ["hangs", bad], [ROLLOUT] * 2), 30)
        assert scorer.stats()["reward/failures"] == 1
    finally:
        released.set()
        scorer.close()


async def test_a_group_that_is_given_up_has_no_call_made_any_more() -> None:
    released, made = threading.Event(), list[str]()

    def reward(task: Task, text: str) -> float:
        made.append(text)
        released.wait(60)
        return 1.0

    scorer = Scorer(reward, config(function="f.py:reward", deadline_s=60.0, workers=1))
    scoring = asyncio.ensure_future(scorer.score_group(TASK, ["a", "b"], [ROLLOUT] * 2))
    await eventually(lambda: made == ["a"])
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    released.set()
    await scorer.score(TASK, "c", ROLLOUT)
    assert made == ["a", "c"]


async def test_an_async_function_that_is_given_up_has_cleaned_up_and_is_not_called_again() -> None:
    done = list[str]()

    async def reward(task: Task, text: str) -> float:
        done.append("begun")
        try:
            return float(await asyncio.get_running_loop().create_future())
        finally:
            await asyncio.sleep(0)
            done.append("cleaned up")

    scorer = Scorer(reward, config(function="f.py:reward", deadline_s=60.0))
    scoring = asyncio.ensure_future(scorer.score_group(TASK, ["a", "b"], [ROLLOUT] * 2))
    await eventually(lambda: len(done) == 2)
    scorer._calls[0].late = 1  # its figures are shown from then on
    assert scorer.stats()["under_way/f.py:reward"] == 2
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert sorted(done) == ["begun"] * 2 + ["cleaned up"] * 2
    assert scorer.stats()["under_way/f.py:reward"] == 0


async def test_a_good_value_beside_a_bad_one_is_read_once() -> None:
    """Steps may come from a generator."""

    def reward(task: Task, text: str) -> Scored | None:
        return Scored(1.0, (step for step in [Step(0, 1, 0.5)])) if text == "2" else None

    scorer = Scorer(reward, config(on_failure="zero", retries=0))
    good, bad = await scorer.score_group(TASK, ["2", "bad"], [ROLLOUT] * 2)
    assert (good.reward, bad.reward) == (1.5, 0.0)


async def test_the_span_of_a_call_that_hangs_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, released = list[str](), threading.Event()
    span = SimpleNamespace(end=lambda: ended.append("span"))
    monkeypatch.setattr(tracing, "begin", lambda *of, **about: span)
    try:
        with pytest.raises(RewardError, match="longer than"):
            await score(lambda task, text: released.wait(60), deadline_s=0.05, retries=0)
        await eventually(lambda: ended == ["span"])
    finally:
        released.set()


async def test_a_plain_function_may_return_what_is_to_be_awaited() -> None:
    async def later() -> float:
        await asyncio.sleep(0)
        return 0.25

    assert (await score(lambda task, text: later())).reward == 0.25


async def test_a_call_that_takes_too_long_is_told_at_once_and_its_retry_keeps_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun: list[str] = []
    released = threading.Event()

    def reward(task: Task, text: str) -> float:
        begun.append(text)
        released.wait(10)
        return 1.0

    scorer = Scorer(reward, config(function="f.py:slow", deadline_s=0.05, workers=1))
    try:
        calls = [asyncio.ensure_future(scorer.score(TASK, text, ROLLOUT)) for text in "ab"]
        await eventually(lambda: begun)
        assert scorer.stats()["under_way/f.py:slow"] == 1, "named before its first deadline"
        with suppress(RewardError):
            await calls[0]
        assert begun[:2] == ["a", "a"]
        assert (
            "f.py:slow at task 3 took longer than reward.deadline_s=0.05, for the first time" in caplog.text
        )
        assert scorer.stats()["late/f.py:slow"] == 2
        assert "under_way/f.py:slow" in scorer.stats()
        await asyncio.gather(*calls, return_exceptions=True)
        assert scorer.stats()["under_way/f.py:slow"] == 0
    finally:
        released.set()
        scorer.close()
