"""Causal attention within each document of a packed sequence, for any Hugging Face model that takes its attention from
the registry: load it with `attn_implementation=PACKED` and call it with `documents=Documents(lengths)`.

Hugging Face passes unknown keyword arguments of a model's forward to the attention function, so documents need no
global. They also carry the context parallelism of a micro-batch (`context.py`).

Where documents begin alike, the row has fewer tokens than they have together. Attention gathers keys and values, so
that each document is whole again; all other layers compute the row alone.

Axes:  N packed tokens · n of them, of this rank's slice · D documents of one bucket · L longest of them · H query
heads · K key heads · E head size
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.device import accelerator
from asyncrl.errors import ConfigError
from asyncrl.learner.models.documents import Documents, DocumentSlice
from asyncrl.models.attention import PLAIN, AttentionRule, dense_attention, flash, flash_attn_varlen_func

log = logging.getLogger(__name__)

PACKED = "asyncrl_packed"

CHANGES_SCORES = {"position_bias", "head_mask"}
"""Options of an attention call that are refused: ALiBi, pruned heads."""


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Documents,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function for Hugging Face's registry: [1, N, H, E], and None for weights.

    query [1, H, N, E]; key, value [1, K, N, E], where values may have another width; s_aux [H]: sinks. Raises
    ConfigError for a model family that uses an option of CHANGES_SCORES.
    """
    _refuse(options, module)
    rule = AttentionRule(scaling, sliding_window, softcap, s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    context = documents.context
    if context is None:
        out = whole_attention(q, k, v, documents, rule)
    elif context.way == "ulysses":
        k, v = context.repeated(k), context.repeated(v)
        rule = rule._replace(sinks_H=None if s_aux is None else context.my_heads(s_aux))
        q, k, v = (context.heads_of_all_tokens(x) for x in (q, k, v))
        out = context.tokens_of_all_heads(whole_attention(q, k, v, documents, rule))
    else:
        k, v = context.all_tokens(k), context.all_tokens(v)
        slices = zip(q.chunk(len(documents.cuts)), documents.cuts, strict=True)
        out = torch.cat([slice_attention(queries, k, v, cut, rule) for queries, cut in slices])
    return out[None], None


def whole_attention(
    q_NHE: Tensor, k_NKE: Tensor, v_NKF: Tensor, documents: Documents, rule: AttentionRule = PLAIN
) -> Tensor:
    """Attention where this rank has all computed tokens: [N, H, F] of these."""
    if not _flash(q_NHE, rule):
        return _bucketed(q_NHE, k_NKE, v_NKF, documents, rule)
    edges, longest = (
        (documents.own_boundaries, documents.boundaries),
        (max(documents.own), max(documents.lengths)),
    )
    if documents.shares:  # flash aligns the keys of a document to its last query
        k_NKE, v_NKF = (x.index_select(0, documents.row_there_N) for x in (k_NKE, v_NKF))
    return flash(q_NHE, k_NKE, v_NKF, edges, longest, rule)


def slice_attention(
    q_nHE: Tensor, k_NKE: Tensor, v_NKF: Tensor, cut: DocumentSlice, rule: AttentionRule = PLAIN
) -> Tensor:
    """Attention for the queries of a slice, to keys of all tokens: [n, H, F]."""
    k, v = (x[cut.seen] for x in (k_NKE, v_NKF))
    if _flash(q_nHE, rule):  # aligns the keys of a document to its last query
        edges = cut.documents.boundaries, cut.key_boundaries
        return flash(q_nHE, k, v, edges, (max(cut.documents.lengths), cut.longest), rule)
    if not cut.before:
        return _bucketed(q_nHE, k, v, cut.documents, rule)
    first = cut.documents.lengths[0]
    parts = [_continued(q_nHE[:first], k[: cut.before + first], v[: cut.before + first], rule)]
    if len(cut.documents.lengths) > 1:
        k, v = (x[cut.before + first :] for x in (k, v))
        parts.append(_bucketed(q_nHE[first:], k, v, cut.others, rule))
    return torch.cat(parts)


def check_flash(config: Config, device: torch.device) -> None:
    """Warns on a GPU where flash-attn is missing. Raises ConfigError if `learner.attention` demands it and it cannot
    run."""
    half, installed = config.model.dtype != "float32", flash_attn_varlen_func is not None
    on_gpu = accelerator.shares_memory(device)
    if config.learner.attention == "flash":
        lacking = {
            "a GPU": not on_gpu,
            "model.dtype=bfloat16": not half,
            "the package flash-attn": not installed,
        }
        rule = f"needs {', '.join(what for what, is_lacking in lacking.items() if is_lacking)}"
        remedy = "pip install 'asyncrl[flash]' beside CUDA's compiler, or set learner.attention=auto"
        require(not any(lacking.values()), "learner.attention", "flash", rule, remedy)
    elif on_gpu and half and not installed:
        log.warning(
            "flash-attn is not installed: torch's scaled_dot_product_attention runs in its place, on documents that "
            "are padded to those of similar length, which is slower and takes more memory; pip install 'asyncrl[flash]'"
        )


def _flash(query: Tensor, rule: AttentionRule) -> bool:
    """Flash attention 2 has no sinks."""
    can = query.dtype in (torch.bfloat16, torch.float16) and rule.sinks_H is None
    return flash_attn_varlen_func is not None and query.device.type == accelerator.CUDA and can


def _continued(q_nHE: Tensor, k_LKE: Tensor, v_LKF: Tensor, rule: AttentionRule) -> Tensor:
    """[n, H, F], for the last n of L tokens of one document."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_nHE, k_LKE, v_LKF))
    return dense_attention(q, k, v, rule)[0].transpose(0, 1)


def _bucketed(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, documents: Documents, rule: AttentionRule
) -> Tensor:
    """One dense causal attention per bucket. Padding is at the end, so no real token attends to it."""
    parts = []
    every = zip(
        documents.buckets, documents.queries.padded(q_NHE), documents.keys.padded(k_NKE, v_NKE), strict=True
    )
    for bucket, queries, keys in every:
        q, k, v = (x.transpose(1, 2) for x in (*queries, *keys))
        parts.append(dense_attention(q, k, v, rule, bucket.before_D).transpose(1, 2))
    return documents.queries.unpadded(parts)


def _refuse(options: dict[str, Any], module: nn.Module) -> None:
    """Refuse options that would change the result. All other options of families are for other kernels."""
    for option in CHANGES_SCORES & options.keys():
        if options[option] is not None:
            config = cast(Any, module).config
            rule = f"its attention has {option!r}, which packed attention does not support"
            remedy = "use a family of docs/models.md"
            raise ConfigError("model.path", config.name_or_path or config.model_type, rule, remedy)


ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
# The registry of masks has no PACKED: then transformers makes none, and does not look at positions on the device for
# documents.
