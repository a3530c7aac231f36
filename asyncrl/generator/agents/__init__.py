"""Rollouts of several turns: chat templates, tools, environments, trajectories."""
