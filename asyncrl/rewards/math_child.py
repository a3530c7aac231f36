"""The process behind `MathVerify`: a question a line on stdin, an answer a line on stdout.

python math_child.py SECONDS MEGABYTES
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any


def main(seconds: int, megabytes: int) -> None:
    """seconds: after which a question ends the process, should its parent be gone."""
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        logging.disable(logging.WARNING)
        import math_verify

        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            signal.alarm(seconds)
            reply = compared(math_verify, **json.loads(line))
            signal.alarm(0)
            print(json.dumps(reply), file=answers, flush=True)


def compared(math_verify: Any, gold: str, text: str) -> dict[str, Any]:
    """{"right": bool, "answer": what `text` comes to or None}, or {"error": why} if the gold answer is none."""
    formula = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
    # Signals are for the parent's deadline alone: no timeouts of the library.
    wanted = math_verify.parse(formula, parsing_timeout=None)
    if not wanted:
        return {"error": f"{gold!r} is no number and no formula"}
    found = math_verify.parse(text, parsing_timeout=None)
    right = math_verify.verify(wanted, found, timeout_seconds=None)
    return {"right": right, "answer": str(found[0]) if found else None}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
