"""A run of a few hundred tasks, each of which tells the learner its ordinal by its reward."""

from __future__ import annotations

from pathlib import Path

TASKS, BATCH = 480, 4
BAD = (7, 30, 31, 200)
"""Tasks whose reward cannot be had: they end as DROPPED(reward)."""

CODE = f"""
def rows():
    for index in range({TASKS}):
        yield {{"prompt": f"{{index % 10}}+1="}}


def reward(task, text):
    if task.ordinal in {BAD}:
        raise ValueError("no reward")
    return {{"ordinal": float(task.ordinal), "square": float(task.ordinal) ** 2}}
"""

CONFIG = """
run: {{name: it, dir: {folder}, versions: 100000, seed: 3}}
model: {{path: {model}}}
tasks: {{source: {folder}/code.py:rows, shuffle: false}}
reward: {{function: "{folder}/code.py:reward", retries: 0}}
batch: {{groups: {batch}, group_size: 2}}
generator: {{engine: scripted, count: 2, slots: 16, max_tokens: 4, max_length: 16, threads: 1, heartbeat_s: 0.2}}
queue: {{max_staleness: 2, lease_s: 3}}
learner: {{threads: 1, micro_batch_tokens: 128, groups_deadline_s: 60}}
checkpoint: {{every: 5}}
launch: {{quiet: true, generator_restarts: 100, queue_restarts: 100, learner_restarts: 100, restart_pause_s: 0}}
"""


def write_config(folder: Path, model: Path) -> Path:
    (folder / "code.py").write_text(CODE, encoding="utf-8")
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(folder=folder, model=model, batch=BATCH), encoding="utf-8")
    return path
