"""Reports: metrics rows, rollouts as text, evaluation, utilization."""
