"""rollouts.jsonl: a few rollouts of some versions, as text, by hand-made groups and in the trainer's loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_cases import random_group, small_config
from trainer_cases import Case, FakeQueue

from asyncrl.config.schema import ModelConfig, RunConfig, TelemetryConfig
from asyncrl.learner.reporting.rollout_log import RolloutLog, TokenText, due, rollout_row
from asyncrl.models.loading import load_tokenizer
from asyncrl.telemetry.sinks import read_rows
from asyncrl.types import Rollout, Task


def written(folder: Path) -> list[dict[str, Any]]:
    return list(read_rows(folder / "rollouts.jsonl"))


@pytest.fixture
def numbers(tmp_path: Path) -> TokenText:
    """Where there is no tokenizer: the text of a token is its id."""
    return TokenText(small_config(tmp_path, model=ModelConfig(path=str(tmp_path))))


def test_a_rollout_is_told_in_full(numbers: TokenText) -> None:
    """With two turns: what the environment wrote between them is part of the answer."""
    rollout = Rollout(
        token_ids=np.arange(10, 17),
        loss_mask=np.array([0, 0, 1, 1, 0, 1, 1], np.int8),
        logprobs=np.zeros(7, np.float32),
        versions=np.array([-1, -1, 3, 3, -1, 4, 4], np.int32),
        finish="length",
        reward=0.5,
        reward_parts={"right": 0.5},
    )
    learner_logprobs = np.array([0, 0, -1, -2, 0, -3, -4], np.float32)
    assert rollout_row(Task(7, "?", {}), rollout, numbers, learner_logprobs) == {
        "ordinal": 7,
        "prompt": "10 11",
        "answer": "12 13 14 15 16",
        "reward": 0.5,
        "parts": {"right": 0.5},
        "tokens": 4,
        "versions": [3, 4],
        "finish": "length",
        "segments": [
            [
                {"text": "10 11 ", "by": "prompt"},
                {"text": "12 ", "version": 3, "logprob": 0.0, "learner_logprob": -1.0},
                {"text": "13 ", "version": 3, "logprob": 0.0, "learner_logprob": -2.0},
                {"text": "14 ", "by": "environment"},
                {"text": "15 ", "version": 4, "logprob": 0.0, "learner_logprob": -3.0},
                {"text": "16 ", "version": 4, "logprob": 0.0, "learner_logprob": -4.0},
            ]
        ],
    }


def test_segments_stand_apart(numbers: TokenText) -> None:
    """What the second one repeats of the first is prompt. In the third the policy made no token."""
    rollout = Rollout(
        token_ids=np.arange(10, 19),
        loss_mask=np.array([0, 1, 1, 0, 0, 0, 1, 0, 0], np.int8),
        logprobs=np.array([0, -0.5, -1.5, 0, 0, 0, -2.5, 0, 0], np.float32),
        versions=np.array([-1, 3, 4, -1, -1, -1, 5, -1, -1], np.int32),
        finish="stop",
        columns={"segment": np.array([0, 0, 0, 1, 1, 1, 1, 2, 2], np.int32)},
    )
    row = rollout_row(Task(7, "?", {}), rollout, numbers, 2 * rollout.logprobs)
    assert (row["prompt"], row["answer"], row["tokens"]) == ("10", "11 12", 3)
    made = [piece for segment in row["segments"] for piece in segment if "by" not in piece]
    assert [(one["version"], one["logprob"], one["learner_logprob"]) for one in made] == [
        (3, -0.5, -1.0),
        (4, -1.5, -3.0),
        (5, -2.5, -5.0),
    ]
    assert [[(piece["text"], piece.get("by")) for piece in segment] for segment in row["segments"]] == [
        [("10 ", "prompt"), ("11 ", None), ("12 ", None)],
        [("13 14 15 ", "prompt"), ("16 ", None)],
        [("17 18 ", "prompt")],
    ]


def test_the_worst_and_the_best_of_four_groups_of_the_first_and_every_other_version(
    tmp_path: Path, model_folder: Path
) -> None:
    telemetry, model = TelemetryConfig(rollouts_every=2), ModelConfig(path=str(model_folder))
    config = small_config(tmp_path, telemetry=telemetry, model=model)
    flat = random_group(0, spread=False)
    log = RolloutLog(tmp_path, config, None)
    assert [version for version in range(1, 6) if due(version, config)] == [1, 2, 4]
    for version in (1, 2, 4):
        log.write(version, [flat, *map(random_group, range(1, 7))])
    log.close()
    rows = written(tmp_path)
    assert [row["version"] for row in rows] == [1] * 7 + [2] * 7 + [4] * 7
    assert [row["ordinal"] for row in rows[:7]] == [0, 1, 1, 2, 2, 3, 3]
    assert [row["reward"] for row in rows[:7]] == [1, 0, 1, 0, 1, 0, 1]
    assert rows[0]["prompt"] == load_tokenizer(config.model).decode(flat.token_ids[:3])


@pytest.mark.parametrize("every", [0, 2])
def test_the_trainer_writes_what_it_has_trained_on(tmp_path: Path, every: int) -> None:
    """Again after a resume: what was written of versions above that is gone."""
    telemetry = TelemetryConfig(rollouts_every=every)
    case = Case(small_config(tmp_path, telemetry=telemetry), FakeQueue())
    case.trainer.run()
    if not every:
        assert not (case.folder / "rollouts.jsonl").exists()
        return
    told = [(row["version"], row["ordinal"]) for row in written(case.folder)]
    assert told == [(1, 0), (1, 0), (1, 1), (1, 1), (2, 2), (2, 2), (2, 3), (2, 3)]
    run = RunConfig(name="case", dir=str(tmp_path), versions=4, resume=True)
    resumed = Case(small_config(tmp_path, telemetry=telemetry, run=run), FakeQueue())
    resumed.trainer.run()
    assert [row["version"] for row in written(case.folder)] == [1] * 4 + [2] * 4 + [4] * 4


def test_pieces_are_the_tokens_of_the_text(tmp_path: Path, model_folder: Path) -> None:
    """The learner's log-probs are of the policy that the version began with: the one that `random_group` lies about."""
    telemetry, model = TelemetryConfig(rollouts_every=1), ModelConfig(path=str(model_folder))
    case = Case(small_config(tmp_path, telemetry=telemetry, model=model), FakeQueue())
    case.trainer.run()
    for row in written(case.folder):
        (pieces,) = row["segments"]
        assert "".join(piece["text"] for piece in pieces) == row["prompt"] + row["answer"]
        made = [piece for piece in pieces if "by" not in piece]
        assert len(made) == row["tokens"]
        assert all(piece["learner_logprob"] < 0 for piece in made)


def test_images_of_a_prompt_are_files(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, small_config(tmp_path, model=ModelConfig(path=str(tmp_path))), None)
    image = b"\x89PNG" + bytes(12)
    prompt = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "image", "image": "a.png"}]}
    ]
    group = replace(random_group(0), task=Task(0, prompt))
    log.write(1, [group])
    log.close()
    name, path = written(tmp_path)[0]["images"]
    assert (tmp_path / name).read_bytes() == image
    assert path == "a.png"
