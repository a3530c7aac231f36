"""Synchronous runs one after another, of which a test compares what they have learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.launch.local_run import train

SYNCHRONOUS = ("queue.max_staleness=0", "evaluation.source=null")


def synchronous_runs(config_file: Path, shared: Sequence[str], **runs: Sequence[str]) -> list[Path]:
    """Train each of `runs`, a name and its keys beside the shared ones. Returns their folders."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        for name, words in runs.items():
            config = load_config(config_file, [*SYNCHRONOUS, *shared, f"run.name={name}", *words])
            summary = train(config)
            assert (summary["versions"], summary["staleness"]["max"]) == (config.run.versions, 0)
    return [config_file.parent / name for name in runs]
