"""What agents cost, and what they learn: the gateway beside its bare engine, a crowd, adapters, log-probs, recipes.

    python -m bench.agents --json bench/results/agents.json --table bench/results/agents.md

    bare     the engine alone: the same prompts and turns, as many at once, without HTTP, texts and a record
    gateway  programs that call the policy: one turn, or four with a tool of 50 ms between two of them
    crowd    500 programs at once: the memory that each takes in the process of the generator, at the most and once all
             have ended. They share one other process, where each has a client of OpenAI. `--rounds 0` measures it alone
    equal    the log-probs that the gateway has recorded, against those that the engine returned, bit by bit
    bytes    a version of adapters, as an engine takes it, over one of all weights
    recipes  `asyncrl demo --recipe NAME`: held-out score and seconds. `--recipes` without a name leaves them out

About 8 minutes on two cores, and 15 for the recipes.

The embedded engine decodes a random model, of no size beside the crowd. The programs of `gateway` run in the engine's
process, in a thread of their own.
"""
