"""Pools: processes that add columns to groups waiting in the queue: the predictions of a model, or rewards."""
