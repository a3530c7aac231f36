"""Deltas: what changed between two versions, as bytes."""
