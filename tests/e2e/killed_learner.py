"""`asyncrl learner` that writes down a hash of each version it publishes, and stands still at one moment, to be killed.

python killed_learner.py NOTES MOMENT VERSION learner CONFIG key=value …

claim    some groups of the step from VERSION are in, not all
copy     checkpoint VERSION is due, nothing of it is there
write    its shards are on disk and not yet whole, while the next versions are trained
commit   it is whole, and the queue does not know
never
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl import cli
from asyncrl.launch import ranks
from asyncrl.learner import checkpoint, process
from asyncrl.learner.backends import storage
from asyncrl.learner.training import version_step

RANK = os.environ.get("RANK", "0")


def note_hashes(notes: Path) -> None:
    """One line per version that this rank publishes: of its shards, in the order of their names."""
    open_publisher = process.open_publisher

    def opened(*words: Any) -> Any:
        publisher = open_publisher(*words)
        shards, publish = words[3].tensors, publisher.publish

        def noted(version: int) -> Any:
            parts = (part.contiguous().numpy().tobytes() for name in sorted(shards) for part in shards[name])
            line = {"version": version, "hash": hashlib.sha256(b"".join(parts)).hexdigest()}
            with (notes / f"hashes{RANK}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            return publish(version)

        publisher.publish = noted
        return publisher

    process.open_publisher = opened


def stand_still(notes: Path) -> None:
    """The first rank tells: it is the one that makes checkpoints whole."""
    if RANK == "0":
        (notes / "standing").touch()
    threading.Event().wait()


def stop_at(moment: str, version: int, stand: Callable[[], None]) -> None:
    saver, way, save = checkpoint.Checkpoints, version_step.Streaming, storage.save_state
    begin, commit, add = saver.begin, saver._commit, way.add

    def slow_begin(self: Any, meta: Any) -> None:
        if moment == "copy" and meta.version == version:
            stand()
        begin(self, meta)

    def slow_save(folder: Path, *words: Any) -> None:
        save(folder, *words)
        if moment == "write" and folder.parent.name == f".v{version:06d}.partial":
            stand()

    def slow_commit(self: Any) -> int:
        done = commit(self)
        if moment == "commit" and done == version:
            stand()
        return done

    def slow_add(self: Any, groups: Any, at: int, *rest: Any, **more: Any) -> None:
        add(self, groups, at, *rest, **more)
        if moment == "claim" and at == version:
            stand()

    saver.begin, saver._commit, way.add, storage.save_state = slow_begin, slow_commit, slow_add, slow_save  # type: ignore[method-assign]


def start_ranks_of_this_kind() -> None:
    run_ranks = ranks.run_ranks
    ranks.run_ranks = lambda _, *words: run_ranks([sys.executable, *sys.argv], *words)


if __name__ == "__main__":
    start_ranks_of_this_kind()
    notes = Path(sys.argv[1])
    note_hashes(notes)
    stop_at(sys.argv[2], int(sys.argv[3]), lambda: stand_still(notes))
    sys.exit(cli.main(sys.argv[4:]))
