"""The race: the plain loop learns as it should, a line for each system in the table, stages that do the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.tasks.addition import write_model_folder
from bench.bars import figures
from bench.peers import goal, stages
from bench.peers.bare_loop import BareLoop
from bench.peers.goal import Race
from bench.peers.race import BARS, _result, systems, table


@pytest.fixture
def race(tmp_path: Path) -> Race:
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model_folder(tmp_path / "model", hidden_size=32, layers=1)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{n:02d}+11=", "answer": str(n + 11)} for n in range(8)]
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    return Race(tmp_path, tmp_path / "model", limit_s=60, seed=1, begun=0)


def test_an_answer_is_right_if_it_ends_by_itself() -> None:
    assert goal.right("21,31,>132", "132", ended=True) == 1
    assert goal.right("21,31,>132", "132", ended=False) == 0
    assert goal.right("21,31,>133", "132", ended=True) == 0
    assert goal.right("132", "132", ended=True) == 0


def test_the_order_of_tasks_is_that_of_the_seed(race: Race) -> None:
    assert race.rows("train") != race.rows("heldout")
    assert sorted(map(str, race.rows("train"))) == sorted(map(str, race.rows("heldout")))
    assert race.rows("train") == race.rows("train")


def test_the_plain_loop_makes_what_is_rewarded_likelier(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward here: an answer begins with a digit below 5."""
    loop, rows = BareLoop(race), race.rows("train")
    low = torch.tensor(loop.tokenizer.encode("01234", add_special_tokens=False))

    def begins_low(new_RT: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.isin(new_RT[:, 0], low).float()

    monkeypatch.setattr(loop, "rewards", begins_low)
    monkeypatch.setattr(goal, "RATE", 1e-2)
    for group in loop.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 1e-2
    loop.schedule = torch.optim.lr_scheduler.ConstantLR(loop.optimizer, 1.0)
    before = begins_low(loop.generate(loop.prompts(rows, 32))).mean()
    for _ in range(40):
        loop.step(rows)
    after = begins_low(loop.generate(loop.prompts(rows, 32))).mean()
    assert before < 0.5 < 0.8 < after


def test_greedy_answers_are_the_same_each_time(race: Race) -> None:
    loop = BareLoop(race)
    prompts = loop.prompts(race.rows("heldout"), 1)
    assert torch.equal(loop.generate(prompts, greedy=True), loop.generate(prompts, greedy=True))


def test_a_system_that_misses_the_target_has_no_time() -> None:
    measured = {"accuracy": 0.5, "seconds": 300.0, "steps": 9, "rollouts_per_s": 7.0}
    assert "time_to_target" not in _result(measured)
    assert _result(measured | {"accuracy": goal.TARGET})["time_to_target"] == 300.0
    text = table(figures([{"accuracy.trl": 0.5, "steps.trl": 9.0}], BARS), 1, 300)
    assert all(f"| {name} |" in text for name in systems())


def test_both_sides_of_a_stage_take_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same weights, on the same answers. Adam first moves each weight by the rate, against its gradient."""
    monkeypatch.setattr(stages, "ROWS", {5: 8})
    stages.write_model(tmp_path / "model")
    before = load_file(tmp_path / "model" / "model.safetensors")
    ours, bare = stages.Asyncrl(tmp_path), stages.Bare(tmp_path)
    case = stages.Case.of(5, rows=8)
    assert case.tokens == 40
    for side in (ours, bare):
        side.training(case)()
        assert side.generation(case)() == case.tokens
    after = [side.parameters() for side in (ours, bare)]
    moved = [torch.cat([(each[name] - before[name]).flatten() for name in before]) for each in after]
    for each in moved:  # the demo's rate is warmed up in ten steps
        assert each.abs().max() == pytest.approx(2e-5, rel=1e-2)
    assert torch.corrcoef(torch.stack(moved))[0, 1] > 0.999
