"""Tensors as bytes: buckets, buffers of staging memory, checksums."""
