"""Stored versions: written by learner ranks to a folder or Redis, read by generators."""
