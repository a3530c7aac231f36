"""Training before reinforcement learning, from data that no policy of the run has made."""
