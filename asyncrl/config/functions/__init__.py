"""Functions that users name in a configuration: how they are found, imported and checked."""
