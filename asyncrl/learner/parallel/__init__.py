"""Axes of parallelism: the mesh, tensor, context and expert parallelism."""
