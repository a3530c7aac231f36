"""The learner on Megatron-core: `backend.MegatronBackend`, for `learner.backend: megatron`.

    architecture   a Hugging Face configuration in Megatron's terms (pure)
    grid           the axes of the ranks, and the rules between them (pure)
    layers         its norms and its attention within documents, plain or from latents
    experts        all experts of a rank in two matrices
    network        the GPT itself, with heads for log-probs or values
    model          one network over all ranks: schedules, gradients, the distributed optimizer
    adapters       LoRA beside its linear maps
    boxes          flat ranges of shards as boxes of checkpoint parameters
    backend        `Backend`, made of the above; weights and checkpoints on disk, box by box

The pure modules and boxes do without `megatron.core`. `sync/layout/megatron.py` maps its parameters to those of
checkpoints.
"""
