"""A run on Kubernetes: its objects as YAML. Nothing here talks to a cluster."""
