"""Benchmarks that run whole runs, as real processes, for any config: `asyncrl bench …`."""
