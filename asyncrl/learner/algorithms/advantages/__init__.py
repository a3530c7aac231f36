"""Advantages: from rewards to one number per policy token."""
