"""A Megatron-core GPT on packed documents, with the outputs of `networks.LanguageModel` and `networks.Critic`.

    tokens [1, N] ─▸ embedding ─▸ layers of this stage ─▸ … ─▸ hidden [N, D] ─▸ head ─▸ log-probs, entropies or values
                                      │                         gathered over tp
                                      └ attention within each document (`layers.py`), rotary positions of
                                        each document as transformers computes them

Axes:  N packed tokens, padding included · n of them on the ranks that share matrices · T of all under the loss mask · R
rollouts · D hidden size · H heads · E head size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from asyncrl.learner.backends.megatron.adapters import CHILD, adapter_parts
from asyncrl.learner.backends.megatron.architecture import Architecture
from asyncrl.learner.backends.megatron.experts import GroupedExperts
from asyncrl.learner.backends.megatron.grid import Grid
from asyncrl.learner.backends.megatron.layers import DocumentAttention, LatentAttention, Packed, RmsNorm
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.documents import Documents
from asyncrl.learner.models.logprobs import LikelyTokens, VocabularyPart, next_logprobs
from asyncrl.learner.models.networks import spread, token_outputs
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.layout.megatron import Gpt, MegatronPart, MegatronPlace, megatron_parts

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16.1 reads it even without TransformerEngine

Head = Literal["logprobs", "values"]
VALUE_HEAD = ("weight_D", "bias_1")


class PackedGpt(GPTModel):
    """One model chunk of this rank, with a head if it is the last. A critic's head starts at 0."""

    def __init__(
        self,
        config: TransformerConfig,
        layers: TransformerBlockSubmodules,
        gpt: Gpt,
        place: MegatronPlace,
        positions: Any,
        head: Head,
        interleaved: bool,
    ) -> None:
        """gpt: shapes, with the padded vocabulary. positions: the transformers configuration, for rotary embeddings."""
        super().__init__(
            config,
            layers,
            gpt.padded_vocab,
            positions.max_position_embeddings,
            pre_process=place.is_first,
            post_process=place.is_last,
            share_embeddings_and_output_weights=gpt.tied and head == "logprobs",
            position_embedding_type="none",
            vp_stage=place.vpp[0] if interleaved else None,
        )
        self.vocabulary, self.head, self.place = gpt.vocab, head, place
        self.wide_head = False
        self.likely: LikelyTokens | None = None
        self.rotary = LlamaRotaryEmbedding(positions)
        if config.recompute_granularity is not None and place.is_first:
            # A layer that is computed again has a gradient only if its input has one; a frozen embedding's has none.
            self.embedding.register_forward_hook(lambda _, __, hidden_n1D: hidden_n1D.requires_grad_())
        if head == "values" and self.post_process:
            del self.output_layer
            like = self.decoder.final_layernorm.weight
            self.weight_D = nn.Parameter(torch.zeros_like(like))
            self.bias_1 = nn.Parameter(like.new_zeros(1))

    def forward(self, batch: MicroBatch, packed: Packed, following: bool = False) -> Any:
        """The head's outputs on the last chunk, as in `models/networks.py`; hidden states on the others."""
        cos_1nE, sin_1nE = self.rotary(self._like(), packed.position_ids_1n)
        packed, documents = replace(packed, cos_nE=cos_1nE[0], sin_nE=sin_1nE[0]), packed.documents
        hidden_n1D = super().forward(
            packed.token_ids_1n, packed.position_ids_1n, cast(Any, None), packed_seq_params=cast(Any, packed)
        )
        if not self.post_process:
            return hidden_n1D
        hidden_nD = self._whole(hidden_n1D)[:, 0]
        if following:
            return self._following(hidden_nD, batch, documents)
        at_T, before_T = documents.scored
        hidden_TD = hidden_nD.index_select(0, before_T)
        out = self._logprobs(hidden_TD, batch, at_T) if self.head == "logprobs" else self._values(hidden_TD)
        return tuple(documents.whole(spread(values_T, at_T, batch.tokens)) for values_T in out)

    def body_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that checkpoints of language models have: all but a critic's head and adapters."""
        every = self.named_parameters()
        return {name: p for name, p in every if name not in VALUE_HEAD and CHILD not in name}

    def constants(self) -> dict[str, Tensor]:
        """The tensors that checkpoints have and nobody trains: the biases of DeepSeek-V3's routers."""
        return {name: held for name, held in self.named_buffers() if name.endswith(".router.expert_bias")}

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if CHILD in name}

    def parts(self, name: str, gpt: Gpt) -> list[MegatronPart]:
        """The checkpoint boxes that a parameter consists of, in the names of a run's checkpoints."""
        if name in VALUE_HEAD:
            shape = tuple(self.get_parameter(name).shape)
            return [MegatronPart(name, shape, Box.whole(shape))]
        if CHILD in name:
            shape = self.get_parameter(name).shape
            return adapter_parts(name, shape, lambda frozen: megatron_parts(frozen, gpt, self.place))
        parts = megatron_parts(name, gpt, self.place)
        if self.head == "logprobs":
            return parts
        return [part._replace(name=f"body.{part.name.removeprefix('model.')}") for part in parts]

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Replaces Megatron's method, which would compute all logits."""
        return hidden_states

    def _like(self) -> Tensor:
        return next(self.decoder.parameters())

    def _whole(self, hidden_n1D: Tensor) -> Tensor:
        """The states of all tokens of the ranks that share matrices. Heads give each of them the whole gradient."""
        if not self.config.sequence_parallel:
            return hidden_n1D
        return tensor_parallel.gather_from_sequence_parallel_region(
            hidden_n1D, tensor_parallel_output_grad=False
        )

    def _columns(self) -> tuple[Tensor, VocabularyPart | None]:
        """(this rank's rows of the head's weight without padding, which rows they are; None: all)."""
        weight_VD = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        rank, ranks = self.place.tp
        if ranks == 1:
            return weight_VD, None
        most, start = len(weight_VD), rank * len(weight_VD)
        part = VocabularyPart(ps.get_tensor_model_parallel_group(), start, most, self.vocabulary)
        return weight_VD[: self.vocabulary - start], part

    def _logprobs(self, hidden_TD: Tensor, batch: MicroBatch, at_T: Tensor) -> tuple[Tensor, ...]:
        weight_VD, part = self._columns()
        return token_outputs(hidden_TD, weight_VD, batch, at_T, self.likely, part=part, wide=self.wide_head)

    def _values(self, hidden_TD: Tensor) -> tuple[Tensor]:
        full = torch.promote_types(hidden_TD.dtype, torch.float32)
        return (hidden_TD.to(full) @ self.weight_D.to(full) + self.bias_1.to(full),)

    def _following(self, hidden_nD: Tensor, batch: MicroBatch, documents: Documents) -> Tensor:
        """[R, vocabulary] log-probs of the tokens that may follow each rollout."""
        here_r, place_r = documents.ends
        mine_r = here_r < batch.rollouts
        here_r, place_r = here_r[mine_r], place_r[mine_r]
        weight_VD, part = self._columns()
        temperature_r = batch.temperature_R[here_r]
        logp_rV = next_logprobs(hidden_nD[place_r], weight_VD, temperature_r, part=part, wide=self.wide_head)
        return documents.whole(spread(logp_rV, here_r, batch.rollouts))


def build(
    shape: Architecture,
    found: Grid,
    dtype: torch.dtype,
    positions: Any,
    head: Head,
    device: torch.device,
    recomputes: bool,
) -> list[PackedGpt]:
    """Collective: make this rank's chunks; their weights are still to be loaded. Megatron compares tied weights.
    recomputes: whether layers keep their inputs alone for the backward pass"""
    gpt = shape.padded(found.tensor)
    config = transformer_config(shape, found, dtype, device, recomputes)
    return [
        PackedGpt(
            config,
            _layers(shape, found.place(chunk, gpt.layers)),
            gpt,
            found.place(chunk, gpt.layers),
            positions,
            head,
            interleaved=found.chunks > 1,
        ).to(device)
        for chunk in range(found.chunks)
    ]


def transformer_config(
    shape: Architecture, found: Grid, dtype: torch.dtype, device: torch.device, recomputes: bool
) -> TransformerConfig:
    """Megatron's configuration: losses and gradients are sums; there is no dropout and no balancing loss."""
    gpt = shape.gpt
    return TransformerConfig(
        num_layers=gpt.layers,
        hidden_size=gpt.hidden,
        num_attention_heads=gpt.heads,
        num_query_groups=gpt.key_heads,
        kv_channels=gpt.head_dim,
        ffn_hidden_size=gpt.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.epsilon,
        qk_layernorm=gpt.qk_norm,
        add_qkv_bias=gpt.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=found.tensor,
        pipeline_model_parallel_size=found.pipeline,
        virtual_pipeline_model_parallel_size=found.chunks if found.chunks > 1 else None,
        pipeline_model_parallel_layout=_stages(found.stages(gpt.layers)),
        context_parallel_size=found.context,
        sequence_parallel=found.sequence,
        variable_seq_lengths=found.chunks == 1,
        moe_token_dispatcher_type="alltoall",  # for any number of tokens
        calculate_per_token_loss=True,
        use_cpu_initialization=device.type == "cpu",
        recompute_granularity="full" if recomputes else None,
        recompute_method="uniform" if recomputes else None,
        recompute_num_layers=1 if recomputes else None,
        # Fusions need Apex, TransformerEngine or CUDA.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        **_mixture(shape, found),
    )


def _stages(layers: Sequence[int]) -> list[list[str]] | None:
    """Megatron's list of what each stage has; None for one stage."""
    if len(layers) == 1:
        return None
    stages = [["decoder"] * count for count in layers]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def _mixture(shape: Architecture, found: Grid) -> dict[str, Any]:
    mixture, router = shape.gpt.mixture, shape.router
    if mixture is None or router is None:
        return {}
    grouped = router.chosen < router.groups
    return {
        "num_moe_experts": mixture.experts,
        "moe_ffn_hidden_size": mixture.ffn,
        "moe_layer_freq": [int(has) for has in shape.mixed],
        "moe_router_topk": router.experts_per_token,
        "moe_router_pre_softmax": not router.sigmoid and not router.renormalised,
        "moe_router_score_function": "sigmoid" if router.sigmoid else "softmax",
        "moe_router_dtype": "fp32" if router.sigmoid else None,  # as transformers computes each
        "moe_router_num_groups": router.groups if grouped else None,
        "moe_router_group_topk": router.chosen if grouped else None,
        "moe_router_topk_scaling_factor": router.scale,
        "moe_router_enable_expert_bias": router.sigmoid,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_shared_expert_intermediate_size": mixture.shared or None,
        "moe_shared_expert_gate": mixture.shared > 0 and mixture.weighs_shared,
        "expert_model_parallel_size": found.expert,
        "expert_tensor_parallel_size": found.expert_tensor,
    }


def _layers(shape: Architecture, place: MegatronPlace) -> TransformerBlockSubmodules:
    layers = [_layer(shape, shape.mixed[number]) for number in place.layers(shape.gpt)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RmsNorm)


def _layer(shape: Architecture, has_experts: bool) -> ModuleSpec:
    """Megatron's layer, with the norms, the attention and the experts of this folder."""
    gpt = shape.gpt
    experts = gpt.mixture.experts if has_experts and gpt.mixture is not None else None
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=gpt.qk_norm, normalization="RMSNorm")
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    if has_experts:
        parts.mlp.submodules.experts = GroupedExperts
    if gpt.latent is not None:
        parts.self_attention = ModuleSpec(LatentAttention, params={"shape": shape})
        return spec
    inner = parts.self_attention.submodules
    inner.core_attention = partial(DocumentAttention, shape=shape)
    if gpt.qk_norm:
        inner.q_layernorm = inner.k_layernorm = RmsNorm
    return spec
