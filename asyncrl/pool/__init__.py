"""Pools: processes that add columns to groups which wait in the queue, what a model says of them or their rewards."""
