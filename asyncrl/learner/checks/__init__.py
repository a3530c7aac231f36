"""Checks before data is trained on: finite numbers, and log-probs that engine and learner agree on."""
