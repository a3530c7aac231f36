"""A generator is killed in the middle of long answers; another one goes on from what the queue has of them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import long_answer_engines
import pytest
from processes import queue_address, started, succeeded, until

pytestmark = pytest.mark.slow

CONFIG = """
run: {{name: it, dir: {folder}, versions: 1, seed: 3}}
model: {{path: {model}}}
tasks: {{source: asyncrl.tasks.addition:train, options: {{digits: 1, held_out: 20}}}}
reward: {{function: "{own}:report_length"}}
batch: {{groups: 2, group_size: 2}}
generator: {{own_engine: "{own}:load", slots: 4, max_tokens: 160, max_length: 180, threads: 1, heartbeat_s: 0.2,
            progress_tokens: 16}}
queue: {{max_staleness: 0, lease_s: 4}}
learner: {{threads: 1, micro_batch_tokens: 4000, groups_deadline_s: 90}}
"""

FIRST_TASKS = (0, 1)
"""Those of the first version. Others may be begun before the run ends."""


def reports(folder: Path, kind: str, pid: int | None = None) -> list[dict[str, Any]]:
    path = folder / "reports"
    entries = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return [entry for entry in entries if entry["kind"] == kind and pid in (None, entry["pid"])]


def config_in(folder: Path, model: Path) -> Path:
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(folder=folder, model=model, own=long_answer_engines.__file__))
    return config


def rollouts(folder: Path) -> list[tuple[Any, ...]]:
    return sorted(
        (one["ordinal"], one["ids"], one["logprobs"], one["versions"])
        for one in reports(folder, "rollout")
        if one["ordinal"] in FIRST_TASKS
    )


def shape(kept: tuple[Any, ...]) -> tuple[int, int]:
    return kept[0], len(kept[1])


def test_a_long_answer_outlives_the_generator_that_began_it(tmp_path: Path, model_folder: Path) -> None:
    folder, calm = tmp_path / "killed", tmp_path / "calm"
    config, env = config_in(folder, model_folder), {"ASYNCRL_REPORTS": str(folder)}
    with started("asyncrl", "queue", str(config)) as queue:
        address = queue_address(folder / "it", queue)
        generator = ("asyncrl", "generator", str(config), address, "--name")
        with started("asyncrl", "learner", str(config), address) as learner:
            with started(*generator, "first", env=env) as first:

                def kept() -> dict[int, dict[str, Any]]:
                    """The newest progress of each task with 48 tokens of each answer or more."""
                    every = reports(folder, "kept", first.pid)
                    return {one["ordinal"]: one for one in every if min(map(len, one["answers"])) >= 48}

                until(lambda: len(kept()) == 2, "48 tokens of each answer", queue, learner, first)
                first.send_signal(signal.SIGKILL)
            before = kept()
            with started(*generator, "second", env=env) as second:
                succeeded(learner)
                succeeded(second)
        succeeded(queue)
    begun = sorted(
        (ordinal, *of)
        for ordinal, one in before.items()
        for of in zip(one["answers"], one["logprobs"], strict=True)
    )
    # The second generator makes the rest alone, and the first part is what was recorded, bit by bit.
    requests = [
        (one["ordinal"], one["made"])
        for one in reports(folder, "request", second.pid)
        if one["ordinal"] in FIRST_TASKS
    ]
    # What was kept last may not have been reported before the kill.
    for (ordinal, made), (of, ids, _) in zip(sorted(requests), sorted(begun, key=shape), strict=True):
        assert (ordinal, made) >= (of, len(ids))
        assert ordinal == of
    killed = rollouts(folder)
    assert [len(ids) for _, ids, _, _ in killed] == [160] * 4
    for (ordinal, ids, logprobs), (_, all_ids, all_logprobs, _) in zip(begun, killed, strict=True):
        assert (ids, logprobs) == (all_ids[: len(ids)], all_logprobs[: len(ids)]), ordinal
    # At one version and at fixed shape, the answers are those of a run that nobody disturbs.
    config = config_in(calm, model_folder)
    with started("asyncrl", "train", str(config), env={"ASYNCRL_REPORTS": str(calm)}) as launcher:
        succeeded(launcher)
    assert rollouts(calm) == killed
