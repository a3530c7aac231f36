"""Break each listed line in a copy of the tree and run its tests: python -m tests.mutants.run [words]

    copy of the tree ── patch ──▸ fork: pytest -x on the tests of the entry ──▸ caught (a test fails) or missed
                     ◂─ restore ─

The parent imports torch once; every child is a fork of it, so an entry costs its tests and little more.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.mutants.child import Child
from tests.mutants.patches import ROOT, Mutant, read_mutants

LIMIT_S, BASELINE_S, POLL_S = 240.0, 1800.0, 0.05
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "runs", "__pycache__", ".*_cache", ".hypothesis", "shared"
)
WARM = (
    "pytest",
    "hypothesis",
    "transformers.models.qwen2.modeling_qwen2",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
"""What most tests import, beside the project itself: the parent imports it for all of them."""

OUTCOMES = {0: "missed", 1: "caught", -1: "caught"}
"""By exit code of pytest; tests that never end notice the line too."""


def write(path: Path, text: str) -> None:
    """Replace a source file and forget its bytecode, whose check of the time of change is too coarse."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def check_all(mutants: Sequence[Mutant], copies: list[Path]) -> Iterator[tuple[Mutant, Child, str]]:
    """Run every mutant, one in each copy at a time; yields each with its child and its outcome."""
    waiting, free = list(mutants), list(copies)
    running: list[tuple[Mutant, Child, Path, str]] = []
    try:
        while waiting or running:
            while waiting and free:
                mutant, copy = waiting.pop(0), free.pop()
                whole = (copy / mutant.file).read_text()
                write(copy / mutant.file, mutant.broken(copy))
                running.append((mutant, Child.start(copy, mutant.tests, LIMIT_S), copy, whole))
            time.sleep(POLL_S)
            for one in list(running):
                mutant, child, copy, whole = one
                if (code := child.poll()) is not None:
                    running.remove(one)
                    yield mutant, child, OUTCOMES.get(code, f"error {code}")
                    write(copy / mutant.file, whole)
                    free.append(copy)
    finally:
        for _, child, *_ in running:
            child.kill()


def passes_unbroken(mutants: Sequence[Mutant], copy: Path) -> bool:
    """All the tests on the unbroken tree: a test that fails anyway catches nothing."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    print(f"{len(tests)} tests and files on the unbroken tree ...", flush=True)
    child = Child.start(copy, tests, BASELINE_S)
    try:
        while (code := child.poll()) is None:
            time.sleep(POLL_S)
    except BaseException:
        child.kill()
        raise
    if code:
        print(child.output(4000), file=sys.stderr)
    return code == 0


def report(mutants: Sequence[Mutant], copies: list[Path]) -> int:
    """Print a line for every mutant. Returns how many are not caught."""
    not_caught = 0
    for mutant, child, outcome in check_all(mutants, copies):
        not_caught += outcome != "caught"
        by = child.failed() if outcome == "caught" else mutant.breaks
        seconds = time.monotonic() - child.began
        print(f"{outcome:8} {seconds:5.1f} s  {mutant.name:48} {by}", flush=True)
        if outcome.startswith("error"):
            print(child.output(1500), file=sys.stderr)
    print(f"{len(mutants) - not_caught} of {len(mutants)} broken lines are caught by quick tests")
    return not_caught


def main() -> int:
    """Returns 0 if all mutants are caught, 1 if some are not, 2 without a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*", help="only entries whose name or file contains one of these")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="copies at work at once")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the unbroken tree first")
    args = parser.parse_args()
    mutants = read_mutants(args.words)
    if not mutants:
        print(f"no entry has {' or '.join(args.words)} in its name or file", file=sys.stderr)
        return 2
    for name in WARM:
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children and copies go then too
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        copies = [Path(place) / f"tree{number}" for number in range(max(1, min(args.jobs, len(mutants))))]
        for copy in copies:
            shutil.copytree(ROOT, copy, ignore=LEFT_OUT, symlinks=True)
        if not args.no_baseline and not passes_unbroken(mutants, copies[0]):
            print("tests fail on the unbroken tree: nothing can be learnt from them", file=sys.stderr)
            return 2
        return 1 if report(mutants, copies) else 0


if __name__ == "__main__":
    sys.exit(main())
