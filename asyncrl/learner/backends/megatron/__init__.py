"""The learner on Megatron-core: `backend.MegatronBackend`, for `learner.backend: megatron`.

    architecture   what a Hugging Face configuration is in Megatron's words, or why it is nothing there (pure)
    grid           how the ranks are laid out, and what goes with what (pure)
    network        the GPT itself, with attention within documents and heads that say log-probs or values
    weights        checkpoints of Hugging Face, box by box, into shards
    model          one network over all ranks: schedules, gradients, the distributed optimizer
    boxes          shards and flat ranges of them as boxes of checkpoint parameters, for saving at any size
    state          checkpoints of a run and exports, made of such boxes
    backend        `Backend`, made of the above

`megatron.core` is imported only by network, model and backend. Where its parameters lie in the checkpoint:
`sync/layout/megatron.py`.
"""
