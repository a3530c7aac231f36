"""The parts of the ledger's state that decide: who may start, how far ahead, who takes what, and what is kept."""
