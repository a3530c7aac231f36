"""Translates a Hugging Face configuration into Megatron's terms.

    Qwen2, Qwen2.5   biases on q, k, v             Mixtral     experts, under names of its own
    Qwen3            norms on q and k              Qwen3-MoE   experts, norms on q and k
    Llama, Mistral   neither                       Qwen2-MoE   experts and a shared one, biases on q, k, v
    DeepSeek-V3 and Kimi-K2   attention from latents; experts and a shared one; sigmoid routers with a bias

Other families are refused by name. This module needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from asyncrl.config.rules import require
from asyncrl.sync.layout.megatron import DEEPSEEK, MIXTRAL, Gpt, Latent, Mixture

DENSE = ("qwen2", "qwen3", "llama", "mistral")
LATENT = "deepseek_v3"
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", LATENT)
REMEDY = "set learner.backend=fsdp"


class Router(NamedTuple):
    """The choice of experts by tokens.

    experts_per_token  chosen of all experts
    sigmoid            scores are sigmoids, to which a bias is added for the choice; else softmax, without a bias
    renormalised       whether the chosen experts' weights add up to 1, before they are scaled
    groups, chosen     experts are in groups, of which a token first chooses some: those with the highest sums of their
                       two highest scores
    scale              of the weights
    """

    experts_per_token: int
    sigmoid: bool = False
    renormalised: bool = True
    groups: int = 1
    chosen: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Architecture:
    """The properties of a model that Megatron's GPT needs.

    gpt          its shapes; the vocabulary is not padded yet
    epsilon      the norms' epsilon
    scaling      of the products of queries and keys
    interleaved  whether the two columns of a rotated pair are neighbours
    router       None in a dense model
    mixed        for each layer, whether it has experts
    windows      for each layer, the number of keys that a query attends to; None: all
    """

    gpt: Gpt
    epsilon: float
    scaling: float
    interleaved: bool = False
    router: Router | None = None
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
    gpt = _gpt(config, mixture)
    router = _router(config) if mixture is not None else None
    if router is not None:
        _check_router(router, gpt, key, path)
    return Architecture(
        gpt,
        config.rms_norm_eps,
        _scaling(config, gpt),
        gpt.latent is not None and config.rope_interleave,
        router,
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
        latent=_latent(config),
    )


def _latent(config: Any) -> Latent | None:
    if config.model_type != LATENT:
        return None
    plain, rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
    return Latent(config.q_lora_rank, config.kv_lora_rank, plain, rotated, config.v_head_dim)


def _scaling(config: Any, gpt: Gpt) -> float:
    """1 / √(head), times a factor of YaRN in DeepSeek-V3, as transformers has it: arXiv:2309.00071, section 3.4."""
    if gpt.latent is None:
        return float(gpt.head_dim**-0.5)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    factor, all_dim = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
    stretched = rope.get("rope_type", "default") != "default" and factor > 1
    return float(gpt.latent.head**-0.5 * ((0.1 * all_dim * math.log(factor) + 1) ** 2 if stretched else 1.0))


def _mixture(config: Any) -> Mixture | None:
    match config.model_type:
        case "mixtral":
            return Mixture(config.num_local_experts, config.intermediate_size, **cast(Any, MIXTRAL))
        case "qwen2_moe":
            shared = config.shared_expert_intermediate_size
            return Mixture(config.num_experts, config.moe_intermediate_size, shared)
        case "qwen3_moe":
            return Mixture(config.num_experts, config.moe_intermediate_size)
        case "deepseek_v3":
            shared = config.n_shared_experts * config.moe_intermediate_size
            return Mixture(
                config.n_routed_experts, config.moe_intermediate_size, shared, **cast(Any, DEEPSEEK)
            )
    return None


def _router(config: Any) -> Router:
    chosen, renormalised = config.num_experts_per_tok, getattr(config, "norm_topk_prob", True)
    if config.model_type != LATENT:
        return Router(chosen, renormalised=renormalised)
    groups = config.n_group, config.topk_group
    return Router(chosen, True, renormalised, *groups, config.routed_scaling_factor)


def _check_router(router: Router, gpt: Gpt, key: str, path: str) -> None:
    """Raises ConfigError for a router of sigmoids that Megatron computes otherwise, or that chooses of no groups."""
    if not router.sigmoid:
        return
    rule = "has routers whose weights are not renormalised, and Megatron renormalises those of sigmoids"
    require(router.renormalised, key, path, rule, REMEDY)
    rule = "has routers that choose one expert, whose weight Megatron does not renormalise"
    require(router.experts_per_token > 1, key, path, rule, REMEDY)
    if router.groups == router.chosen:
        return
    experts = gpt.mixture.experts if gpt.mixture is not None else 0
    rule = f"has {experts} experts in {router.groups} groups, which must be equally large, with two experts at least"
    require(experts % router.groups == 0 and experts >= 2 * router.groups, key, path, rule, REMEDY)
    rule = (
        f"chooses {router.chosen} of {router.groups} groups for {router.experts_per_token} experts; Megatron takes "
        "half as many groups as experts"
    )
    require(router.experts_per_token // router.chosen == 2, key, path, rule, REMEDY)


def _has_experts(config: Any, layer: int) -> bool:
    """Qwen's mixtures may have dense layers between those with experts, DeepSeek's have some before them."""
    if config.model_type == LATENT:
        return layer >= (config.first_k_dense_replace or 0)
    every = getattr(config, "decoder_sparse_step", 1)
    return layer not in (getattr(config, "mlp_only_layers", None) or ()) and (layer + 1) % every == 0


def _window(config: Any, layer: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return None
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or kinds[layer] == "sliding_attention" else None
