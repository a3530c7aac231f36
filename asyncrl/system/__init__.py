"""The machine below: files that are replaced whole, signals that end a process, places in Redis."""
