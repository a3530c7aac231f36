"""Rollouts as packed micro-batches."""
