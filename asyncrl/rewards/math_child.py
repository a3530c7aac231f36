"""The process of `MathVerify`: it reads a question from each line of stdin and writes an answer to stdout.

python math_child.py SECONDS MEGABYTES
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any


def main(seconds: int, megabytes: int) -> None:
    """seconds: a question that takes longer ends the process, in case its parent is gone."""
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # libraries may print to stdout
        logging.disable(logging.WARNING)
        import math_verify

        confine()
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            signal.alarm(seconds)
            reply = compared(math_verify, **json.loads(line))
            signal.alarm(0)
            print(json.dumps(reply), file=answers, flush=True)


def confine() -> None:
    """On Linux, before any formula: no sockets, no written files, no other calls that `confinement.py` forbids."""
    if sys.platform == "linux":
        sys.path.insert(
            0, str(Path(__file__).with_name("sandbox"))
        )  # without the package, which takes long to import
        confinement = importlib.import_module("inside.confinement")
        del sys.path[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        confinement.forbid_calls()


def compared(math_verify: Any, gold: str, text: str) -> dict[str, Any]:
    """{"right": bool, "answer": the parsed answer or None}, or {"error": reason} for a gold answer that cannot be
    parsed."""
    formula = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
    # The process has its own alarm: no timeouts of the library.
    wanted = math_verify.parse(formula, parsing_timeout=None)
    if not wanted:
        return {"error": f"{gold!r} is no number and no formula"}
    found = math_verify.parse(text, parsing_timeout=None)
    right = math_verify.verify(wanted, found, timeout_seconds=None)
    return {"right": right, "answer": str(found[0]) if found else None}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
