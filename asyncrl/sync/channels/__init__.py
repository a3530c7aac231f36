"""Channels that carry buckets between two processes: shared memory, TCP, NCCL."""
