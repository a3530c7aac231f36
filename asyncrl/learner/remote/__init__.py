"""Models that learn in a pool's processes, seen from the learner."""
