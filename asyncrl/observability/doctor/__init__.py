"""The doctor: rules that look at a run and name what is wrong with it, by its figures, with the key to change."""
