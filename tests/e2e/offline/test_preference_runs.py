"""A reward model and DPO from pairs of answers, as commands; and what reads their models afterwards."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from learner_cases import same
from processes import final_weights, finished, newest_checkpoint, ran, rows, started, until
from transformers import AutoModelForSequenceClassification

from asyncrl.rewards.classifier import Classifier
from asyncrl.tasks.addition import heldout_pairs
from asyncrl.telemetry.sinks import read_rows
from asyncrl.types import Task

CONFIG = """
run: {{name: it, dir: {folder}, seed: 3}}
model: {{path: {model}}}
tasks: {{source: asyncrl.tasks.addition:train_pairs, options: {{digits: 2, held_out: 100}}}}
evaluation: {{source: asyncrl.tasks.addition:heldout_pairs, options: {{digits: 2, size: 100}}}}
learner: {{threads: 1, micro_batch_tokens: 4096}}
reward_model_training:
  {{steps: 200, batch_size: 64, every: 100, optimizer: {{lr: 1e-2, warmup_steps: 5, schedule: linear}}}}
dpo: {{steps: 16, batch_size: 16, every: 8, optimizer: {{lr: 1e-3, warmup_steps: 2}}}}
checkpoint: {{every: 3}}
launch: {{quiet: true}}
"""


@pytest.fixture
def config(tmp_path: Path, model_folder: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(folder=tmp_path, model=model_folder))
    return path


def scores(run: Path) -> list[dict[str, float]]:
    return [row for row in read_rows(run / "metrics.jsonl") if "eval/loss" in row]


def train(verb: str, config: Path, name: str, *words: str) -> Path:
    ran("asyncrl", verb, str(config), f"run.name={name}", *words)
    return config.parent / f"{name}-{verb}"


def right_order(model: Path) -> float:
    """The share of held-out pairs in which the classifier gives the chosen answer the greater reward."""
    classifier, right = Classifier(str(model)), 0
    rows_held_out = heldout_pairs(2, 100)
    for ordinal, row in enumerate(rows_held_out):
        chosen, rejected = classifier(Task(ordinal, row["prompt"]), [row["chosen"], row["rejected"]])
        right += chosen > rejected
    return right / len(rows_held_out)


def test_a_reward_model_scores_held_out_answers_as_the_classifier_reads_it(config: Path) -> None:
    run = train("reward-model", config, "it")
    last = scores(run)[-1]
    assert last["eval/accuracy"] >= 0.75, "guesses are right in one half"
    assert right_order(run / "final") == last["eval/accuracy"], "the same scores in training and afterwards"
    described = json.loads((run / "final/config.json").read_text())
    assert described["architectures"] == ["Qwen2ForSequenceClassification"]
    loaded = AutoModelForSequenceClassification.from_pretrained(run / "final")
    assert loaded.num_labels == 1


def test_ranks_and_adapters_train_the_same_head(config: Path) -> None:
    """Sharded over two ranks as on one; under adapters the head is trained, too."""
    short = [
        "reward_model_training.steps=5",
        "reward_model_training.every=5",
        "learner.micro_batch_tokens=256",
    ]
    alone = train("reward-model", config, "one", *short)
    both = train("reward-model", config, "two", *short, "learner.processes=2")
    assert [row["train/loss"] for row in rows(both)] == pytest.approx(
        [row["train/loss"] for row in rows(alone)], rel=1e-4
    )
    small = train("reward-model", config, "small", *short, "model.lora.rank=2")
    before, after = final_weights(alone), final_weights(small)
    assert before.keys() == after.keys()
    assert scores(small)[-1]["eval/loss"] != pytest.approx(scores(alone)[-1]["eval/loss"], abs=1e-6)


def test_dpo_prefers_the_chosen_answers_more_than_its_reference(config: Path) -> None:
    """The reference is the policy at the beginning: margins begin at 0, and the loss at log 2."""
    run = train("dpo", config, "it", "dpo.every=1", "model.dtype=float32")
    found = rows(run)
    assert found[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert found[0]["train/margin"] == pytest.approx(0.0, abs=1e-4)
    first, last = scores(run)[0], scores(run)[-1]
    assert last["eval/margin"] > first["eval/margin"]
    assert last["eval/loss"] < first["eval/loss"]


def test_dpo_that_is_stopped_goes_on_with_its_first_reference(config: Path) -> None:
    whole, run = train("dpo", config, "whole"), config.parent / "it-dpo"
    with started("asyncrl", "dpo", str(config), "checkpoint.asynchronous=false") as process:
        until(lambda: newest_checkpoint(run) > 0, "checkpoint", process)
        process.kill()
        process.wait()
    train("dpo", config, "it", "run.resume=true")
    assert same(final_weights(whole), final_weights(run))


@pytest.mark.parametrize("loss", ["ipo", "simpo"])
def test_other_losses_train(config: Path, loss: str) -> None:
    run = train("dpo", config, loss, f"dpo.loss={loss}", "dpo.beta=1", "dpo.every=8")
    assert scores(run)[-1]["eval/margin"] > scores(run)[0]["eval/margin"]
    assert (run / "reference_margins.msgpack").exists() == (loss == "ipo")


@pytest.mark.parametrize(
    ("verb", "word", "problem"),
    [
        (
            "reward-model",
            "learner.parallel.pipeline=2",
            "learner.parallel.pipeline = 2: cuts networks",
        ),
        (
            "reward-model",
            "learner.backend=megatron",
            "learner.backend = 'megatron': trains policies and critics",
        ),
        ("dpo", "tasks.source=asyncrl.tasks.addition:train", "has no 'chosen' answer"),
        ("dpo", "learner.parallel.tensor=3", "takes multiples of 3 processes"),
        ("dpo", "model.path=nowhere", "model.path = 'nowhere'"),
        ("sft", "sft.until_accuracy=0.5", "sft.until_accuracy = 0.5: needs held-out tasks"),
    ],
)
def test_bad_input_is_refused_before_a_run_folder_is_made(
    config: Path, verb: str, word: str, problem: str
) -> None:
    with started("asyncrl", verb, str(config), "learner.processes=2", word) as process:
        code, printed = finished(process)
    assert (code, problem in printed) == (2, True), printed
    assert [path.name for path in config.parent.iterdir()] == ["config.yaml"]
