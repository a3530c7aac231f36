"""A run whose tokens come from a real vLLM server, whose ranks take the weights from the learner themselves."""

from __future__ import annotations

from pathlib import Path

import missing
import pytest
from processes import STARTS_S, counts_of, free_port, listens, ran, rows, started, until

from asyncrl.tasks.addition import write_model_folder

pytest.importorskip("vllm", reason=missing.VLLM)
pytestmark = pytest.mark.slow

SERVE = str(Path(__file__).parents[2] / "contract" / "engines" / "vllm_serve.py")


def test_a_run_trains_on_what_a_server_says(config_file: Path) -> None:
    run, model, port = config_file.parent / "it", config_file.parent / "model", free_port()
    write_model_folder(model, hidden_size=128, layers=2)  # vLLM wants heads of 32
    words = (
        f"model.path={model}",
        "generator.engine=vllm_server",
        f"generator.server.urls=[http://127.0.0.1:{port}]",
        "generator.slots=8",
        "queue.max_staleness=1",
        "learner.groups_deadline_s=300",
    )
    with started(SERVE, str(model), str(port), "8", "16", "--load-format", "dummy") as server:
        until(lambda: listens(port), "server", server, deadline_s=STARTS_S)
        ran("asyncrl", "train", str(config_file), *words)
    assert counts_of(run) == (4, 16, 0)
    told = rows(run)
    assert max(row["train/staleness/max"] for row in told) <= 1
    assert [name for row in told for name in row if name.startswith("train/logprob_gap/probe/")]
