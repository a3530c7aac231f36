"""A race to the same accuracy: asyncrl, TRL's GRPO trainer, and a plain synchronous loop, on the same cores.

race.py        the race: each system in a process of its own, one after the other
bare_loop.py   the honest rival: generation and training in turns, in one process, without a framework
trl_loop.py    TRL's GRPOTrainer, in bench/peers/.venv-trl
goal.py        the task, the settings and the clock that both have in common with asyncrl's demo
"""
