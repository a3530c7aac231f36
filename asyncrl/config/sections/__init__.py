"""One dataclass for each section of the YAML file, with a field for each key: as many as the section has keys."""
