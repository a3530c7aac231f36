"""A Megatron-core GPT on packed documents, with the outputs of `networks.LanguageModel` and `networks.Critic`.

    tokens [1, N] ─▸ embedding ─▸ layers of this stage ─▸ … ─▸ hidden [N, D] ─▸ head ─▸ log-probs, entropies or values
                                      │                         gathered over tp
                                      └ attention within each document (`models/attention.py`), rotary positions of
                                        each document as transformers computes them

Megatron's own attention takes packed documents only with TransformerEngine. It is not used here, so that tests on a CPU
run the code of GPUs.

Axes:  N packed tokens, padding included · T of them under the loss mask · D hidden size · H heads · E head size
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

from asyncrl.device.copies import on_device
from asyncrl.learner.backends.megatron.adapters import CHILD, adapter_parts
from asyncrl.learner.backends.megatron.architecture import Architecture
from asyncrl.learner.backends.megatron.grid import Grid
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.shared_prompts import computed_tokens
from asyncrl.learner.models.attention import packed_attention
from asyncrl.learner.models.documents import Documents
from asyncrl.learner.models.logprobs import LikelyTokens, VocabularyPart, next_logprobs
from asyncrl.learner.models.networks import spread, token_outputs
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.layout.megatron import Gpt, MegatronPart, MegatronPlace, megatron_parts

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16.1 reads it even without TransformerEngine

Head = Literal["logprobs", "values"]
VALUE_HEAD = ("weight_D", "bias_1")
FILL_TOKENS = 64
"""The longest document of padding: attention over such documents costs almost nothing."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch as Megatron takes it, including the arguments of attention (Megatron's `packed_seq_params`). N is a
    multiple of the ranks that share the tokens."""

    token_ids_1N: Tensor
    position_ids_1N: Tensor
    documents: Documents
    cos_NE: Tensor | None = None
    sin_NE: Tensor | None = None
    qkv_format: str = "documents"

    @staticmethod
    def of(batch: MicroBatch, tokens: int, device: torch.device, source_N: Tensor | None = None) -> Packed:
        """Pad a batch on the CPU, without repeated tokens, to `tokens` with documents without loss. source_N: see
        `Documents`"""
        fill = tokens - computed_tokens(batch, source_N)
        extra = [FILL_TOKENS] * (fill // FILL_TOKENS) + [fill % FILL_TOKENS] * (fill % FILL_TOKENS > 0)
        position_ids_N = torch.cat([batch.position_ids_N, *(torch.arange(n) for n in extra)])
        if source_N is not None:
            source_N = torch.cat([source_N, batch.tokens + torch.arange(fill)])
        lengths = [*batch.segment_lengths, *extra]
        documents = Documents(lengths, device, mask_N=batch.loss_mask_N, source_N=source_N)
        token_ids_N, position_ids_N = (
            documents.mine(values_N) for values_N in (F.pad(batch.token_ids_N, (0, fill)), position_ids_N)
        )
        return Packed(
            on_device(token_ids_N[None], device), on_device(position_ids_N[None], device), documents
        )


class RmsNorm(nn.Module):
    """RMSNorm as in transformers: in float32 up to the weight. Under sequence parallelism Megatron adds the gradients
    of weights that have the mark, because each rank computes some of the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        full = x.float()
        full = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * full.to(x.dtype)


class DocumentAttention(nn.Module):
    """Megatron's core attention: queries [N, 1, H, E] → [N, 1, H · E], for this rank's heads."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, windows: tuple[int | None, ...], **_: Any
    ) -> None:
        super().__init__()
        self.window = windows[layer_number - 1]  # layers count from 1, over the whole model
        self.scaling = cast(int, config.kv_channels) ** -0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Packed, **__: Any
    ) -> Tensor:
        cos_N1E, sin_N1E = (
            cast(Tensor, x)[:, None] for x in (packed_seq_params.cos_NE, packed_seq_params.sin_NE)
        )
        q_1HNE, k_1HNE = (_rotated(x[:, 0], cos_N1E, sin_N1E).transpose(0, 1)[None] for x in (query, key))
        out_1NHE, _ = packed_attention(
            self,
            q_1HNE,
            k_1HNE,
            value[:, 0].transpose(0, 1)[None],
            None,
            documents=packed_seq_params.documents,
            scaling=self.scaling,
            sliding_window=self.window,
        )
        return out_1NHE[0].flatten(1)[:, None]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


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
        if head == "values" and self.post_process:
            del self.output_layer
            like = self.decoder.final_layernorm.weight
            self.weight_D = nn.Parameter(torch.zeros_like(like))
            self.bias_1 = nn.Parameter(like.new_zeros(1))

    def forward(self, batch: MicroBatch, packed: Packed, following: bool = False) -> Any:
        """The head's outputs on the last chunk, as in `models/networks.py`; hidden states on the others."""
        cos_1NE, sin_1NE = self.rotary(self._like(), packed.position_ids_1N)
        packed = replace(packed, cos_NE=cos_1NE[0], sin_NE=sin_1NE[0])
        hidden_N1D = super().forward(
            packed.token_ids_1N, packed.position_ids_1N, cast(Any, None), packed_seq_params=cast(Any, packed)
        )
        if not self.post_process:
            return hidden_N1D
        hidden_ND = self._whole(hidden_N1D)[:, 0]
        if following:
            return self._following(hidden_ND, batch, packed.documents)
        at_T, before_T = packed.documents.scored
        hidden_TD = hidden_ND.index_select(0, before_T)
        out = self._logprobs(hidden_TD, batch, at_T) if self.head == "logprobs" else self._values(hidden_TD)
        return tuple(spread(values_T, at_T, batch.tokens) for values_T in out)

    def body_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that checkpoints of language models have: all but a critic's head and adapters."""
        every = self.named_parameters()
        return {name: p for name, p in every if name not in VALUE_HEAD and CHILD not in name}

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

    def _whole(self, hidden_N1D: Tensor) -> Tensor:
        """The states of all tokens. Heads give every rank their whole gradient."""
        if not self.config.sequence_parallel:
            return hidden_N1D
        return tensor_parallel.gather_from_sequence_parallel_region(
            hidden_N1D, tensor_parallel_output_grad=False
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

    def _following(self, hidden_ND: Tensor, batch: MicroBatch, documents: Documents) -> Tensor:
        """[R, vocabulary] log-probs of the tokens that may follow each rollout."""
        _, ends = documents.ends
        weight_VD, part = self._columns()
        hidden_RD = hidden_ND[ends[: batch.rollouts]]
        return next_logprobs(hidden_RD, weight_VD, batch.temperature_R, part=part, wide=self.wide_head)


def build(
    shape: Architecture, found: Grid, dtype: torch.dtype, positions: Any, head: Head, device: torch.device
) -> list[PackedGpt]:
    """Collective: make this rank's chunks; their weights are still to be loaded. Megatron compares tied weights."""
    gpt = shape.padded(found.tensor)
    config = transformer_config(shape, found, dtype, device)
    return [
        PackedGpt(
            config,
            _layers(shape, found.place(chunk)),
            gpt,
            found.place(chunk),
            positions,
            head,
            interleaved=found.chunks > 1,
        ).to(device)
        for chunk in range(found.chunks)
    ]


def transformer_config(
    shape: Architecture, found: Grid, dtype: torch.dtype, device: torch.device
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
        sequence_parallel=found.sequence,
        variable_seq_lengths=found.chunks == 1,
        moe_token_dispatcher_type="alltoall",  # for any number of tokens
        calculate_per_token_loss=True,
        use_cpu_initialization=device.type == "cpu",
        # Fusions need Apex, TransformerEngine or CUDA.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        **_mixture(shape, found),
    )


def _mixture(shape: Architecture, found: Grid) -> dict[str, Any]:
    mixture = shape.gpt.mixture
    if mixture is None:
        return {}
    return {
        "num_moe_experts": mixture.experts,
        "moe_ffn_hidden_size": mixture.ffn,
        "moe_layer_freq": [int(has) for has in shape.mixed],
        "moe_router_topk": shape.experts_per_token,
        "moe_router_pre_softmax": not shape.renormalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        "moe_shared_expert_intermediate_size": mixture.shared or None,
        "moe_shared_expert_gate": mixture.shared > 0,
        "expert_model_parallel_size": found.expert,
        "expert_tensor_parallel_size": found.expert_tensor,
    }


def _layers(shape: Architecture, place: MegatronPlace) -> TransformerBlockSubmodules:
    layers = [_layer(shape, shape.mixed[number]) for number in place.layers(shape.gpt)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RmsNorm)


def _layer(shape: Architecture, has_experts: bool) -> ModuleSpec:
    """Megatron's layer, with the norms and the attention of this file."""
    gpt = shape.gpt
    experts = gpt.mixture.experts if has_experts and gpt.mixture is not None else None
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=gpt.qk_norm, normalization="RMSNorm")
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    inner = parts.self_attention.submodules
    inner.core_attention = partial(DocumentAttention, windows=shape.windows)
    if gpt.qk_norm:
        inner.q_layernorm = inner.k_layernorm = RmsNorm
    return spec
