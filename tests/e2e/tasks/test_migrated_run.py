"""A run on data of verl and TRL, as these have it, with reward functions written for them and a judge beside."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import yaml
from judge_stand_in import JudgeStandIn, materials
from pyarrow import parquet

from asyncrl.config.load import load_config
from asyncrl.launch.local_run import train
from asyncrl.launch.preflight import preflight
from asyncrl.telemetry.sinks import read_rows

SCORES = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "sums" and extra_info["split"] == "train"
    return {"score": float(solution_str.startswith(ground_truth[0])), "pred": solution_str}

def digits(prompts, completions, completion_ids, solution, **columns):
    assert len(completions) == 4 and prompts[0][0]["role"] == "user"
    return [sum(map(str.isdigit, one[0]["content"])) / 8 for one in completions]
"""


def verdict(system: str, shown: str) -> str:
    """Answers with many digits are liked, and the longer one is better."""
    found = materials(shown)
    if "answer" in found:
        return json.dumps({"many": min(10, sum(map(str.isdigit, found["answer"])))})
    a, b = len(found["answer A"]), len(found["answer B"])
    return json.dumps({"better": "A" if a > b else "B" if b > a else "tie"})


@pytest.fixture
def judge() -> Iterator[tuple[JudgeStandIn, str]]:
    """An endpoint in a thread of its own: the run's processes are others."""
    loop, stand_in = asyncio.new_event_loop(), JudgeStandIn(verdict, ["500", "garbage"])
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield stand_in, asyncio.run_coroutine_threadsafe(stand_in.start(), loop).result(30)
    asyncio.run_coroutine_threadsafe(stand_in.close(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


def write_data(folder: Path) -> None:
    """Sums as verl's preparation of data sets writes them, and as TRL's conversational data sets are."""
    pairs = [(a, b) for a in range(4) for b in range(4)]
    of_verl = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": "train", "index": index},
        }
        for index, (a, b) in enumerate(pairs)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(of_verl), folder / "verl.parquet")
    of_trl = [
        {"prompt": [{"role": "user", "content": f"{b}+{a}="}], "solution": str(a + b)} for a, b in pairs
    ]
    datasets.Dataset.from_list(of_trl).save_to_disk(folder / "trl")


@pytest.mark.slow
def test_data_and_functions_of_others_train_beside_a_judge(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, judge: tuple[JudgeStandIn, str]
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_data(tmp_path)
    (tmp_path / "scores.py").write_text(SCORES)
    (tmp_path / "plain.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    stand_in, url = judge
    endpoint = {"url": url, "model": "judge", "folder": str(tmp_path / "judge")}
    functions: dict[str, Any] = {
        # Tasks of the other source have not the columns that a function reads.
        "verl": {
            "function": "asyncrl.rewards:Verl",
            "options": {"path": str(tmp_path / "scores.py")},
            "on_failure": "zero",
        },
        "trl": {
            "function": "asyncrl.rewards:Trl",
            "options": {"function": f"{tmp_path / 'scores.py'}:digits"},
            "per": "group",
            "on_failure": "zero",
        },
        "liked": {
            "function": "asyncrl.rewards:RubricJudge",
            "options": {"endpoint": endpoint, "criteria": {"many": "It has many digits."}},
        },
        "better": {
            "function": "asyncrl.rewards:PairwiseJudge",
            "options": {"endpoint": endpoint, "opponents": 2},
            "per": "group",
        },
    }
    config = {
        "run": {"name": "it", "dir": str(tmp_path), "versions": 3},
        "model": {"path": str(model_folder)},
        "tasks": {
            "mixture": {
                "verl": {"source": str(tmp_path / "verl.parquet")},
                "trl": {"source": str(tmp_path / "trl")},
            },
            "chat_template": str(tmp_path / "plain.jinja"),
        },
        "reward": {"functions": functions},
        "batch": {"groups": 4, "group_size": 4},
        "generator": {"slots": 32, "max_tokens": 8, "max_length": 32, "threads": 1, "heartbeat_s": 0.2},
        "learner": {"threads": 1, "micro_batch_tokens": 128, "groups_deadline_s": 60},
        "launch": {"quiet": True},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    made = load_config(tmp_path / "config.yaml")
    preflight(made)
    summary = train(made)
    assert (summary["versions"], summary["groups_trained"]) == (3, 12)
    rows = [row for row in read_rows(tmp_path / "it" / "metrics.jsonl") if "perf/step_s" in row]
    for part in ("trl", "liked/many", "better"):
        assert any(row.get(f"rollout/reward/part/{part}", 0) > 0 for row in rows), part
    assert all(
        row["rollout/reward/part/better"] == pytest.approx(0.5) for row in rows
    )  # wins and losses of a group
    assert any("rollout/reward/part/verl" in row for row in rows)
    spent = json.loads((tmp_path / "judge" / "spent.json").read_text())
    assert (
        spent["calls"] >= len(stand_in.requests) > 12
    )  # the end of a run may cut calls before they are sent
