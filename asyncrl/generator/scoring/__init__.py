"""Scores of rollouts: reward functions, their parts and steps, and filters of groups."""
