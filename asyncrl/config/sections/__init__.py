"""One dataclass per section of the YAML file."""
