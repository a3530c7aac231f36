"""Lines broken on purpose: each is a text patch, and the quick tests that must fail with it."""
