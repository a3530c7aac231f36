"""Floating-point operations of training, from the shape of the model alone.

    6 · N · tokens         every weight that a token meets: a product and a sum forward, twice that backward
    6 · A · Σ length²      causal attention, A = layers · heads · head size: scores and sums over half of length² pairs

Kaplan et al. 2020 (arXiv:2001.08361), section 2.1, and PaLM (arXiv:2204.02311), appendix B, which counts attention
without the mask and so has twice the second term. Recomputation under activation checkpointing is not counted: these
are the operations that the model needs, not those that the device does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.parallel.mesh import ModelShape
from asyncrl.models import load_model_config


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """weights: N, those that a token meets, with chosen experts alone, and without a token table that is not the head
    too · attention: A"""

    weights: int
    attention: int

    @staticmethod
    def of(model: ModelConfig) -> TrainingFlops:
        """Without loading weights. Raises ConfigError as `load_model_config` does."""
        config = load_model_config(model)
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
        text = config.get_text_config()
        experts = ModelShape.of(config).experts
        chosen = text.num_experts_per_tok / experts if experts else 1.0
        weights = sum(
            parameter.numel() * (chosen if ".experts." in name else 1.0)
            for name, parameter in network.named_parameters()
        )
        table, head = network.get_input_embeddings(), network.get_output_embeddings()
        if head is not None and head.weight is not table.weight:
            weights -= table.weight.numel()
        head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return TrainingFlops(round(weights), text.num_hidden_layers * text.num_attention_heads * head_size)

    def flops(self, tokens: float, squares: float) -> float:
        """Operations of forward and backward over rollouts with `tokens` in all. squares: the sum of their squared
        lengths."""
        return 6.0 * (self.weights * tokens + self.attention * squares)

    @property
    def even_tokens(self) -> float:
        """The length at which attention costs as much as all the rest."""
        return self.weights / self.attention


def squares(lengths: Iterable[int]) -> int:
    """The sum of the squared lengths."""
    return sum(length * length for length in lengths)


def even_tokens(model: ModelConfig) -> float:
    """`TrainingFlops.even_tokens`; infinite for a model that only its backend knows: rollouts cost their tokens."""
    try:
        return TrainingFlops.of(model).even_tokens
    except ConfigError:
        return math.inf
