"""The folder of one run: its configuration, its inputs and who may use it."""
