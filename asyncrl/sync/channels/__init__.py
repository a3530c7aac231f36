"""Channels that carry buckets between two processes: shared memory, TCP, gloo, NCCL."""
