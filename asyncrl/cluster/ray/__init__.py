"""A run on a Ray cluster. Ray starts and watches processes; groups, weights and metrics do not pass through it."""
