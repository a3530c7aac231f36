"""A run whose tokens come from a server of somebody else: the stand-in of SGLang, a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import counts_of, free_port, listens, ran, rows, started, until

pytestmark = pytest.mark.slow

SERVE = str(Path(__file__).parents[2] / "contract" / "engines" / "sglang_serve.py")


def test_a_run_trains_on_what_a_server_says(config_file: Path, model_folder: Path) -> None:
    run, port = config_file.parent / "it", free_port()
    words = (
        "generator.engine=sglang",
        "generator.kv=recompute",
        f"generator.server.urls=[http://127.0.0.1:{port}]",
        f"generator.server.folder={config_file.parent / 'versions'}",
        "queue.max_staleness=1",
    )
    with started(SERVE, str(model_folder), str(port), "32", "16") as server:
        until(lambda: listens(port), "server", server)
        ran("asyncrl", "train", str(config_file), *words)
    assert counts_of(run) == (4, 16, 0)
    told = rows(run)
    assert max(row["train/staleness/max"] for row in told) <= 1
    gaps = [value for row in told for name, value in row.items() if name.startswith("train/logprob_gap/")]
    assert gaps
