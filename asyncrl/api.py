"""`asyncrl.train`: what `asyncrl train` does, from a user's own script or notebook with the user's own functions.

model, tasks, reward, max_staleness, **keys ──▸ settings ──▸ config ──▸ preflight ──▸ launcher ──▸ TrainResult
                        │
                        └▸ rows, functions of cells ──▸ files in <run folder>/inputs
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.functions.function_spec import refuse_in_import
from asyncrl.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from asyncrl.launch.caller import TrainCall

Keys = Mapping[str, Any]
Function = Callable[..., Any]


@dataclass(frozen=True, eq=False, repr=False)
class TrainResult(Mapping[str, Any]):
    """A run that is over. As a mapping it is `summary`: `result["reward_end"]`.

    Attributes:
        folder: Of the run: config.yaml, logs, checkpoints, and all that is named below.
        model: The final policy, a folder that `transformers` loads.
        rows: One mapping a version, and one for each evaluation: the lines of metrics.jsonl (docs/metrics.md).
        summary: The run in one mapping, as in summary.json.
    """

    folder: Path
    model: Path
    rows: list[dict[str, Any]]
    summary: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.summary[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summary)

    def __len__(self) -> int:
        return len(self.summary)

    def __repr__(self) -> str:
        of = self.summary
        rewards = [of.get(key) for key in ("reward_start", "reward_end")]
        start, end = ("none" if value is None else f"{value:.3g}" for value in rewards)
        return (
            f"TrainResult({of['ended']} at version {of['versions']}, reward {start} -> {end}, "
            f"model={str(self.model)!r}, {len(self.rows)} rows)"
        )


def train(
    config: str | os.PathLike[str] | Keys | None = None,
    overrides: Sequence[str] | Keys | None = None,
    *,
    model: str | os.PathLike[str] | Keys | None = None,
    tasks: Function | Sequence[Any] | str | os.PathLike[str] | Keys | None = None,
    reward: Function | Mapping[str, Any] | str | None = None,
    max_staleness: int | None = None,
    **keys: Any,
) -> TrainResult:
    """Train a model on this machine until the last version, and return how it went.

        def reward(task, text):  # or async; a number, {part: number}, or asyncrl.Scored
            return float(text.strip() == task.data["answer"])

        if __name__ == "__main__":  # not needed in a notebook
            result = asyncrl.train(model="my-model", tasks="problems.jsonl", reward=reward, run={"versions": 20})
            print(result["reward_end"], result.model)

    All that a YAML file can set can be set here, and each argument can be left out if a file has it. docs/keys.md lists
    every key; `asyncrl config FILE --print` prints those of a file.

    Args:
        config: A YAML file, or a mapping in the shape of one; none: the defaults, and a new folder for each run,
            runs/run, runs/run-2, … unless run={"name": …} names it.
        overrides: Set last: "key=value" words as on the command line, or a mapping.
        model: A Hugging Face folder or hub name (model.path), or the section `model`.
        tasks: Where prompts come from (tasks.source), or the section `tasks`:
            a list of rows {"prompt": …, **data}; a prompt is a text, or a list of messages with role and content;
            a function without arguments that returns or yields rows, and is called in each process;
            a .jsonl or .parquet file, a folder, or 'hf:name' of the Hugging Face hub.
        reward: (task, text) or (task, text, rollout) -> a number, {part: number} or `asyncrl.Scored`, plain or
            async (reward.function); several by name, whose sum is trained on; or the section `reward`.
            `task.data` holds the fields of the row but its prompt.
        max_staleness: How many versions old a rollout may be that is trained on; 0 is synchronous training
            (queue.max_staleness).
        **keys: Sections by name, as in a file: queue={"wait_share": 0.05}, include=["algorithms/vapo.yaml"],
            evaluation={"source": held_out_rows, "every": 5}; or dotted: **{"queue.wait_share": 0.05}.

    The processes of the run import functions again. One of a script must stand at its top level, and the script must
    start its work under `if __name__ == "__main__"`. One of a notebook cell is written to the run's folder with what
    it reads: imports, constants, other functions.

    Returns:
        TrainResult: folder, model, rows, summary.

    Raises:
        ConfigError, TaskError: before anything starts: a key, its value, the rule and the remedy.
        ProcessDiedError, DeadlineError: a process of the run ended, with why; or did not answer.
        KeyboardInterrupt, StoppedError: stopped by Ctrl-C, or a signal, after a checkpoint: run={"resume": True, …}
            goes on.
    """
    from asyncrl.launch.caller import call_of

    refuse_in_import()
    arguments = {"model": model, "tasks": tasks, "reward": reward, "max_staleness": max_staleness}
    return _run(call_of(config, overrides, arguments, keys))


def _run(call: TrainCall) -> TrainResult:
    """Check the call in its run folder, train, and read what the run has left."""
    from asyncrl.launch.folder.inputs import Inputs
    from asyncrl.launch.folder.run_folder import locked_run_folder, refuse_own_config, remove_empty
    from asyncrl.launch.local_run import train as train_here
    from asyncrl.launch.preflight import preflight
    from asyncrl.launch.processes import begin_imports
    from asyncrl.telemetry.sinks import read_rows

    call, draft = call.in_folder(call.load(Inputs(None)))
    if call.file is not None:
        refuse_own_config(call.file, draft)
    with locked_run_folder(draft) as folder:
        inputs = Inputs(folder)
        try:
            loaded = call.load(inputs)
            begin_imports(loaded)
            preflight(loaded)
            summary = train_here(loaded)
        except (ConfigError, TaskError) as error:
            inputs.discard()
            remove_empty(folder)
            if isinstance(error, TaskError):
                raise TaskError(inputs.as_given(str(error))) from None
            raise
    return TrainResult(folder, folder / "final", list(read_rows(folder / "metrics.jsonl")), summary)
