"""The twin of a run: its events simulated on the real ledger, with stage times of a real run or of a file.

    run folder ──▸ calibrate.py ─┐
    YAML file ───────────────────┴▸ StageTimes ──▸ simulate.py ──▸ Simulated ──▸ plan.py: the best split of N devices

Pure: no torch, no processes, no clock but that of the simulation.
"""
