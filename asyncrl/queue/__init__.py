"""The transfer queue: tasks out, groups back, and a guarantee of how stale a group is when trained on."""
