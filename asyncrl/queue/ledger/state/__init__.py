"""The state of one stream: tasks, steps, leases, stages and sizes. Data and bookkeeping, no rules."""
