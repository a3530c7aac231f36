"""Translates a Hugging Face configuration into Megatron's terms.

    Qwen2, Qwen2.5   biases on q, k, v             Mixtral     experts, under names of its own
    Qwen3            norms on q and k              Qwen3-MoE   experts, norms on q and k
    Llama, Mistral   neither                       Qwen2-MoE   experts and a shared one, biases on q, k, v

Other families are refused by name. This module needs no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

from asyncrl.config.rules import require
from asyncrl.sync.layout.megatron import MIXTRAL, Gpt, Mixture

DENSE = ("qwen2", "qwen3", "llama", "mistral")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
REMEDY = "set learner.backend=fsdp"


@dataclass(frozen=True, slots=True)
class Architecture:
    """The properties of a model that Megatron's GPT needs.

    gpt                its shapes; the vocabulary is not padded yet
    epsilon            the norms' epsilon
    experts_per_token  0 in a dense model
    renormalised       whether the chosen experts' weights add up to 1
    mixed              for each layer, whether it has experts
    windows            for each layer, the number of keys that a query attends to; None: all
    """

    gpt: Gpt
    epsilon: float
    experts_per_token: int = 0
    renormalised: bool = True
    mixed: tuple[bool, ...] = ()
    windows: tuple[int | None, ...] = ()

    def padded(self, tensor: int) -> Gpt:
        """The shapes with a vocabulary that `tensor` ranks share evenly."""
        rows = -(-self.gpt.vocab // tensor) * tensor
        return dataclasses.replace(self.gpt, padded_vocab=rows)


def architecture(config: Any, key: str, path: str) -> Architecture:
    """Translate a transformers configuration. Raises ConfigError, under the key of `path`, for a model that is not
    supported on Megatron-core."""
    kind = config.model_type
    require(
        kind in (*DENSE, *MIXTURES),
        key,
        path,
        f"is a {kind}; on Megatron only {', '.join((*DENSE, *MIXTURES))} are supported",
        REMEDY,
    )
    for flag in ("attention_bias", "mlp_bias"):
        require(not getattr(config, flag, False), key, path, f"has {flag}, which is not mapped", REMEDY)
    require(config.hidden_act == "silu", key, path, f"has {config.hidden_act} for silu", REMEDY)
    layers = config.num_hidden_layers
    mixture = _mixture(config)
    return Architecture(
        _gpt(config, mixture),
        config.rms_norm_eps,
        config.num_experts_per_tok if mixture else 0,
        getattr(config, "norm_topk_prob", True),
        tuple(mixture is not None and _has_experts(config, layer) for layer in range(layers)),
        tuple(_window(config, layer) for layer in range(layers)),
    )


def _gpt(config: Any, mixture: Mixture | None) -> Gpt:
    heads = config.num_attention_heads
    return Gpt(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        padded_vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        qkv_bias=config.model_type in ("qwen2", "qwen2_moe") and getattr(config, "qkv_bias", True),
        qk_norm=config.model_type in ("qwen3", "qwen3_moe"),
        mixture=mixture,
    )


def _mixture(config: Any) -> Mixture | None:
    match config.model_type:
        case "mixtral":
            return Mixture(config.num_local_experts, config.intermediate_size, **cast(Any, MIXTRAL))
        case "qwen2_moe":
            shared = config.shared_expert_intermediate_size
            return Mixture(config.num_experts, config.moe_intermediate_size, shared)
        case "qwen3_moe":
            return Mixture(config.num_experts, config.moe_intermediate_size)
    return None


def _has_experts(config: Any, layer: int) -> bool:
    """Qwen's mixtures may have dense layers between those with experts."""
    every = getattr(config, "decoder_sparse_step", 1)
    return layer not in (getattr(config, "mlp_only_layers", None) or ()) and (layer + 1) % every == 0


def _window(config: Any, layer: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return None
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or kinds[layer] == "sliding_attention" else None
