"""The groups of one version become optimizer steps."""
