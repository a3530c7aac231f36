"""How fast groups go from a generator's process to a learner's, through this queue and through others.

    python -m bench.queue --json FILE --table FILE      all systems side by side, then the bars of the project
    python -m bench.queue --soak                        1,000 clients, 20 GB

    __main__.py ─ runner.py ──┬─▸ endpoint.py serve    SYSTEM      three processes, told by JSON lines
                              ├─▸ endpoint.py consume  SYSTEM
                              └─▸ endpoint.py produce  SYSTEM
    report.py: figures, bars, table     load.py: what is carried     limits.py: memory, disk, the ledger alone
    systems.py: what is compared        soak.py, soak_side.py: the soak

A system is a module with three functions, each of which runs in a process of its own:

    serve(folder, options, load)    context manager that yields the address for the two others
    produce(address, run)           hands over run.load.groups groups; run.sends(i) as it begins with one
    consume(address, run)           run.got(i, columns) for each, with arrays that can be indexed,
                                    before it asks for more, or with the time when they were there
"""
