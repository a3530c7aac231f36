"""What a generator makes of its engine: how much is lost on the way through worker and queue, and to long answers.

    python -m bench.generator --json FILE --table FILE
    python -m bench.generator --load short     the demo's model, slots and lengths: the rest of the process counts most

    __main__.py ──┬─▸ learner.py    queue, tasks, weights; takes groups as fast as they come, η = 4
                  └─▸ pool.py       one generator, as a run has it; in turns with it, its engine alone
    model.py: the model and the configuration    watched.py: lengths of answers, and what the engine did
    report.py: the bars, and a table

The model is random and has 28M parameters. Answers have as many tokens as the bench says: all the same, or lognormal
with σ = 1 and the same mean. The engine alone gets prompts like those of the tasks, as many at once as the worker gives
it. It keeps its weights, and the learner's process rests meanwhile: what updates cost, and whatever the learner takes
from the cores that they share, counts against the worker. How much that is, two figures tell.

    python -m bench.generator.speculation      drafts of the embedded engine: the time of a batch, and of its long tail

An engine that fails leaves its bars unmeasured, the others are reported, and the exit code is 1.
"""
