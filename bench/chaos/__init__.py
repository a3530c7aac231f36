"""Does a run reach its end while its processes are killed, one after another?

    python -m bench.chaos --json FILE --every SECONDS     the demo, undisturbed and with kills; see --help

    __main__.py ─ runs.py ──▸ `asyncrl train`, in a process of its own
                     └─▸ kills.py      who is there to be killed
                     └─▸ history.py    what the queue's journal says of every task: each must have ended once

tests/chaos kills at moments of its own choosing, with the same means.
"""
