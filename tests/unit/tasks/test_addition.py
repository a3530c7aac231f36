from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.generator.scoring.steps import check_steps
from asyncrl.tasks.addition import heldout, problem, reward, stepwise, train, with_cost, write_model_folder
from asyncrl.types import Finish, Rollout, Task

TASK = Task(0, "47+85=", {"answer": "132", "target": "21,31,>132"})


def rollout(finish: Finish) -> Rollout:
    empty = np.zeros(0, np.int64)
    return Rollout(empty, empty.astype(np.int8), empty.astype(np.float32), empty.astype(np.int32), finish)


def test_the_scratchpad_holds_digits_and_carries() -> None:
    assert problem(47, 85, 2) == {"prompt": "47+85=", "answer": "132", "target": "21,31,>132"}
    assert problem(0, 3, 2) == {"prompt": "00+03=", "answer": "3", "target": "30,00,>3"}
    assert problem(999, 1, 3)["target"] == "01,01,01,>1000"


def test_train_and_held_out_problems_share_none_and_are_all() -> None:
    learnt = {row["prompt"] for row in train()}
    tested = {row["prompt"] for row in heldout()}
    assert (len(learnt), len(tested)) == (9500, 500)
    assert not learnt & tested


def test_a_slice_of_the_problems_has_problems() -> None:
    problems = train()
    assert [*problems[1:3]] == [problems[1], problems[2]]


def test_every_target_earns_the_reward() -> None:
    for row in heldout(digits=3, size=50):
        data = {"answer": row["answer"], "target": row["target"]}
        assert reward(Task(0, row["prompt"], data), row["target"], rollout("stop")) == 1.0


@pytest.mark.parametrize("text", ["21,31,>133", "132", "21,31,>132[25]", "21,31,>132>", "", "21,31,>0132"])
def test_other_answers_earn_nothing(text: str) -> None:
    assert reward(TASK, text, rollout("stop")) == 0.0


def test_an_answer_that_did_not_end_earns_nothing() -> None:
    assert reward(TASK, "21,31,>132", rollout("stop")) == 1.0
    assert reward(TASK, "21,31,>132", rollout("length")) == 0.0


def steps_of(text: str, task: Task = TASK) -> list[tuple[str, float, object]]:
    scored = stepwise(task, text, rollout("stop"))
    assert scored.steps is not None
    check_steps(scored.steps, text)
    return [(text[step.start : step.stop], step.reward, step.anchor) for step in scored.steps]


def test_each_place_of_the_scratchpad_is_a_step_with_a_reward_and_a_state_of_its_own() -> None:
    assert steps_of("21,31,>132") == [("21,", 0.1, "0 "), ("31,", 0.1, "1 1,"), (">132", 0.0, "21,31,")]
    assert stepwise(TASK, "21,31,>132", rollout("stop")).parts == 1.0
    # Another digit, the same carry: the next place begins in the same state.
    assert steps_of("91,31,>139")[:2] == [("91,", 0.0, "0 "), ("31,", 0.1, "1 1,")]
    assert steps_of("20,31,>132")[1] == ("31,", 0.1, "1 0,")
    assert stepwise(TASK, "21,31,>132", rollout("length")).parts == 0.0


@pytest.mark.parametrize(
    "text", ["", ",", ",,,,,", ">132", "21,31,", "21", "21,31,>132,>132", "2,1,3,1,>132"]
)
def test_every_text_has_steps_that_cover_it(text: str) -> None:
    assert "".join(piece for piece, _, _ in steps_of(text)) == text


def test_what_follows_the_places_earns_no_place() -> None:
    assert [reward for _, reward, _ in steps_of("21,31,21,31,")] == [0.1, 0.1, 0.0, 0.0]


def test_an_answer_longer_than_the_target_costs() -> None:
    assert with_cost(TASK, "21,31,>132", rollout("stop")) == {"answer": 1.0, "cost": 0.0}
    assert with_cost(TASK, "21,31,>>132", rollout("stop")) == {"answer": 1.0, "cost": 1.0}
    assert with_cost(TASK, "", rollout("stop")) == {"answer": 0.0, "cost": 0.0}


def test_more_held_out_problems_than_there_are() -> None:
    with pytest.raises(ConfigError, match="1 to 20 of 1 digits"):
        heldout(digits=1, size=21)


def test_the_model_folder_is_read_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    write_model_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("47+85=21,31,>132", add_special_tokens=False)["input_ids"]
    assert len(ids) == len("47+85=21,31,>132")
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "47+85=21,31,>132"
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.vocab_size, config.eos_token_id) == (len(tokenizer), tokenizer.eos_token_id)
    model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == 792_704
