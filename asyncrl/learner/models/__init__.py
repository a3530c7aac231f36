"""Networks that the learner trains or evaluates: attention over packed tokens, log-probs, LoRA."""
