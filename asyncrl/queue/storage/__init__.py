"""Journals and payload stores of the broker: in memory, in files, in Redis."""
