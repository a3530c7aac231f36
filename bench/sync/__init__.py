"""How fast a new policy reaches a generator, through asyncrl and in other ways.

    python -m bench.sync --json FILE --table FILE       all systems side by side, then the bars of the project

    __main__.py ─ runner.py ──┬─▸ learner.py     two ranks, FSDP's shards      (asyncrl)
                              ├─▸ generator.py   one rank, or two of tensor parallelism
                              └─▸ gloo.py        one learner, two generator ranks: what others do
    model.py: shapes and layouts    tensors.py: the weights    report.py: bars, table

The clock runs from the call of `publish` until the last generator rank has verified its live parameters: snapshot,
transfer, flip and hash. The others are given the gathered model for nothing, and verify nothing.
"""
