"""Bytes between clients and the broker: envelopes, groups and columns."""
