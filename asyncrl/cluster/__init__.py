"""Runs on clusters that somebody has already: the processes of `asyncrl train` on several machines."""
