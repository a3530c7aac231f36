"""How fast and how lean the learner's half of a step is, beside padding, a plain loss and TRL.

    python -m bench.learner --json FILE --table FILE     on CPUs, one thread a process, with the bars of the project
    python -m bench.learner --gpu --json FILE            on one GPU: model FLOPs utilisation, tokens/s, peak memory

    __main__.py ──┬─▸ passes.py       forward and backward, packed and padded
                  ├─▸ steps.py        whole steps of asyncrl: one process, and two ranks
                  ├─▸ trl_peer.py     whole steps of TRL's GRPOTrainer after generation, in an environment of its own
                  └─▸ head.py         memory of log-probs at a vocabulary of 32k
    rollouts.py: what all of them train on    model.py: which model    report.py: bars, table    gpu.py

All processes live through the whole run and take turns, so that every ratio is of neighbours in time.
"""
