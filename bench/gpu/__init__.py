"""Does asyncrl work on this machine's GPUs: ten minutes, no network.

    make gpu-check                                      all checks; writes bench/results/gpu_NAME.md
    python -m bench.gpu --only checksum stream          some of them
    python -m bench.gpu --device cpu --tiny             the same code without a GPU, for its own test
    make gpu-wheels FOR=3.12                            elsewhere, for a GPU's machine that has torch and no network

    __main__.py ─▸ packages.py, page.py ─▸ checks.py ─ a process a part ─▸ ends.py

A check that fails does not end the others. A check that this machine cannot run is skipped by name, with the reason.
"""
