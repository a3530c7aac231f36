"""Does a run reach its end under faults of every kind, one after another?

    python -m bench.chaos --faults KIND,… --seed N     the demo, undisturbed and with faults; see --help

    __main__.py ─ runs.py ──▸ launcher.py: `asyncrl train`, in a process of its own
                     │           └─▸ detour.py: its generators and learner reach all others through …
                     ├─▸ proxy.py      … a proxy that cuts, delays and corrupts
                     ├─▸ faults.py     what strikes, and whom
                     │     └─▸ processes.py, redis_pair.py, jumping_clock.py
                     ├─▸ history.py    what the queue's journal says of every task: each must have ended once
                     └─▸ verdict.py    what must hold, and the table

tests/chaos has a short run of it, and kills at moments of its own choosing.
"""
