"""Views of a run on a terminal: a live table, or a line every few seconds."""
