"""The parts of a decoder layer that differ from Megatron's: norms, and attention within packed documents.

    DocumentAttention   queries, keys, values of Megatron's SelfAttention ─▸ rotated ─▸ `models/attention.py`
    LatentAttention     a whole attention layer: queries, keys and values from latents of a few hundred columns (MLA)

        x ─▸ q_down ─▸ norm ─▸ q_up ──────────▸ queries        │ rotated part of each head
        x ─▸ kv_down ─▸ norm ─▸ kv_up ────────▸ keys, values   │
                  └──▸ one rotated key of all heads ───────────┘

Megatron's own attention takes packed documents only with TransformerEngine. It is not used here, so that tests on a CPU
run the code of GPUs. MLA: DeepSeek-V2, arXiv:2405.04434, section 2.1.

Axes:  N packed tokens, padding included · n of them on the ranks that share matrices · s of these between layers · D
hidden size · H heads of this rank · E head size · R rotated part of a head · V size of a head's value
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel as tp
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from asyncrl.device.copies import on_device
from asyncrl.learner.backends.megatron.architecture import Architecture
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.shared_prompts import computed_tokens
from asyncrl.learner.models.attention import packed_attention
from asyncrl.learner.models.documents import Documents
from asyncrl.learner.parallel.context import ContextParallel
from asyncrl.sync.layout.megatron import Latent

FILL_TOKENS = 64
"""The longest document of padding: attention over such documents costs almost nothing."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch as Megatron takes it, including the arguments of attention (Megatron's `packed_seq_params`)."""

    token_ids_1n: Tensor
    position_ids_1n: Tensor
    documents: Documents
    cos_nE: Tensor | None = None
    sin_nE: Tensor | None = None
    qkv_format: str = "documents"

    @staticmethod
    def of(
        batch: MicroBatch,
        tokens: int,
        device: torch.device,
        context: ContextParallel | None = None,
        source_N: Tensor | None = None,
    ) -> Packed:
        """Pad a batch on the CPU, without repeated tokens, to `tokens` with documents without loss. tokens: a multiple
        of the ranks that share them · context, source_N: see `Documents`"""
        fill = tokens - computed_tokens(batch, source_N)
        extra = [FILL_TOKENS] * (fill // FILL_TOKENS) + [fill % FILL_TOKENS] * (fill % FILL_TOKENS > 0)
        position_ids_N = torch.cat([batch.position_ids_N, *(torch.arange(n) for n in extra)])
        if source_N is not None:
            source_N = torch.cat([source_N, batch.tokens + torch.arange(fill)])
        lengths = [*batch.segment_lengths, *extra]
        documents = Documents(lengths, device, context, mask_N=batch.loss_mask_N, source_N=source_N)
        token_ids_n, position_ids_n = (
            documents.mine(values_N) for values_N in (F.pad(batch.token_ids_N, (0, fill)), position_ids_N)
        )
        return Packed(
            on_device(token_ids_n[None], device), on_device(position_ids_n[None], device), documents
        )

    def rotated(self, x_nHE: Tensor, interleaved: bool = False) -> Tensor:
        """Queries or keys, rotated by their positions. interleaved: the two columns of a pair are neighbours, else they
        are half a head apart; in the result they are half a head apart."""
        cos_n1E, sin_n1E = (cast(Tensor, each)[:, None] for each in (self.cos_nE, self.sin_nE))
        if interleaved:
            x_nHE = torch.cat([x_nHE[..., 0::2], x_nHE[..., 1::2]], -1)
        left, right = x_nHE.chunk(2, -1)
        return x_nHE * cos_n1E + torch.cat([-right, left], -1) * sin_n1E


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
    """Megatron's core attention: queries [n, 1, H, E] → [n, 1, H · E], for this rank's heads."""

    def __init__(self, config: TransformerConfig, layer_number: int, shape: Architecture, **_: Any) -> None:
        super().__init__()
        self._window = shape.windows[layer_number - 1]  # layers count from 1, over the whole model
        self._scaling = shape.scaling

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Packed, **__: Any
    ) -> Tensor:
        q_nHE, k_nHE = (packed_seq_params.rotated(x[:, 0]) for x in (query, key))
        return attention(self, q_nHE, k_nHE, value[:, 0], packed_seq_params, self._scaling, self._window)


class LatentAttention(MegatronModule):
    """An attention layer: [s, 1, D] → ([s, 1, D], no bias).

    The maps to latents are whole on every rank, so under sequence parallelism a rank computes the latents of its own
    tokens, and these travel in place of the hidden states.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, shape: Architecture, **_: Any) -> None:
        super().__init__(config=config)
        latent, hidden, heads = cast(Latent, shape.gpt.latent), config.hidden_size, config.num_attention_heads
        self._latent, self._scaling, self._interleaved = latent, shape.scaling, shape.interleaved
        if latent.query is None:
            self.linear_q_proj = self._column(hidden, heads * latent.head)
        else:
            self.linear_q_down_proj = WholeLinear(hidden, latent.query, config)
            self.q_layernorm = RmsNorm(config, latent.query)
            self.linear_q_up_proj = self._column(latent.query, heads * latent.head)
        self.linear_kv_down_proj = WholeLinear(hidden, latent.key + latent.rotated, config)
        self.kv_layernorm = RmsNorm(config, latent.key)
        self.linear_kv_up_proj = self._column(latent.key, heads * (latent.plain + latent.value))
        self.linear_proj = RowParallelLinear(
            heads * latent.value,
            hidden,
            config=config,
            init_method=config.init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def _column(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        config = self.config
        return ColumnParallelLinear(
            inputs, outputs, config=config, init_method=config.init_method, bias=False, gather_output=False
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: Packed, **__: Any
    ) -> tuple[Tensor, None]:
        q_nHE = self._queries(hidden_states)
        k_nHE, v_nHV, k_n1R = self._keys_and_values(hidden_states)
        plain_nHE, q_nHR = q_nHE.split([self._latent.plain, self._latent.rotated], -1)
        q_nHR, k_n1R = (packed_seq_params.rotated(x, self._interleaved) for x in (q_nHR, k_n1R))
        q_nHE = torch.cat([plain_nHE, q_nHR], -1)
        k_nHE = torch.cat([k_nHE, k_n1R.expand(-1, k_nHE.shape[1], -1)], -1)
        return self.linear_proj(attention(self, q_nHE, k_nHE, v_nHV, packed_seq_params, self._scaling))

    def _queries(self, hidden_s1D: Tensor) -> Tensor:
        """[n, H, E]"""
        if self._latent.query is None:
            q_n1O, _ = self.linear_q_proj(hidden_s1D)
        else:
            latent_s1L, _ = self.linear_q_down_proj(hidden_s1D)
            q_n1O, _ = self.linear_q_up_proj(self.q_layernorm(latent_s1L))
        return q_n1O[:, 0].unflatten(-1, (-1, self._latent.head))

    def _keys_and_values(self, hidden_s1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """([n, H, plain part of a head], [n, H, V], [n, 1, R])"""
        latent = self._latent
        down_s1O, _ = self.linear_kv_down_proj(hidden_s1D)
        latent_s1L, rotated_s1R = down_s1O.split([latent.key, latent.rotated], -1)
        up_n1O, _ = self.linear_kv_up_proj(self.kv_layernorm(latent_s1L))
        k_nHE, v_nHV = (
            up_n1O[:, 0]
            .unflatten(-1, (-1, latent.plain + latent.value))
            .split([latent.plain, latent.value], -1)
        )
        # Models with experts share out the tokens wherever they share out matrices. The heads of each rank give a term
        # of the gradient of the rotated key.
        return k_nHE, v_nHV, tp.gather_from_sequence_parallel_region(rotated_s1R)


class WholeLinear(nn.Module):
    """A linear map whose matrix every rank of tp has whole: (outputs, no bias) of the tokens of this rank."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


def attention(
    module: nn.Module,
    q_nHE: Tensor,
    k_nKE: Tensor,
    v_nKV: Tensor,
    packed: Packed,
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """[n, 1, H · V]: attention within each document. window: the number of keys that a query attends to; None: all"""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_nHE, k_nKE, v_nKV))
    out_1nHV, _ = packed_attention(
        module, q, k, v, None, documents=packed.documents, scaling=scaling, sliding_window=window
    )
    return out_1nHV[0].flatten(1)[:, None]
