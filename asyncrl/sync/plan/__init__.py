"""Plans: who sends what to whom, and the cost. Pure; no torch."""
