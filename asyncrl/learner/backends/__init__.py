"""Backends: they hold the models, gradients and optimizers of the learner."""
