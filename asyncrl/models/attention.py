"""Causal attention, with the variations that families of models have.

Axes:  B documents · n queries, by default for the last of L keys · H query heads · K key heads · E head size · F head
size of values
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None


class AttentionRule(NamedTuple):
    """A family's variation of attention.

    scaling   factor of q·k; None: 1/√E
    window    the number of keys that a query attends to, its own included; None: all up to its own
    softcap   c: scores become c·tanh(score/c) (Gemma 2, arXiv:2408.00118, section 2)
    sinks_H   for each head the score of one more key, whose value is 0 (gpt-oss, arXiv:2508.10925, section 2.2)
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    def scale(self, size: int) -> float:
        """The factor of q·k for heads of this size."""
        return size**-0.5 if self.scaling is None else self.scaling


PLAIN = AttentionRule()


def dense_attention(
    q_BHnE: Tensor, k_BKLE: Tensor, v_BKLF: Tensor, rule: AttentionRule, before_B: Tensor | None = None
) -> Tensor:
    """Dense attention: [B, H, n, F]. before_B: keys before the first query; None: L - n"""
    n, length = q_BHnE.shape[2], k_BKLE.shape[2]
    plain = n == length and before_B is None and (rule.window is None or rule.window >= length)
    seen_XnL = None if plain else seen(n, length, rule.window, q_BHnE.device, before_B)
    if rule.softcap is not None or rule.sinks_H is not None:
        return _scored(q_BHnE, k_BKLE, v_BKLF, rule, seen_XnL)
    grouped = q_BHnE.shape[1] != k_BKLE.shape[1]
    return F.scaled_dot_product_attention(
        q_BHnE, k_BKLE, v_BKLF, seen_XnL, is_causal=plain, scale=rule.scaling, enable_gqa=grouped
    )


def seen(
    n: int,
    length: int,
    window: int | None,
    device: torch.device | None = None,
    before_B: Tensor | None = None,
) -> Tensor:
    """bool [n, L], or [B, 1, n, L]: the keys that each of n queries attends to. before_B: as of `dense_attention`

    >>> seen(2, 4, window=3).int().tolist()
    [[1, 1, 1, 0], [0, 1, 1, 1]]
    >>> seen(2, 4, window=3, before_B=torch.tensor([1])).int().tolist()
    [[[[1, 1, 0, 0], [1, 1, 1, 0]]]]
    """
    query_n1, key_L = torch.arange(n, device=device)[:, None], torch.arange(length, device=device)
    if before_B is None:
        last_Xn1 = length - n + query_n1
    else:  # padding behind the last key sees that one: a query without any key is NaN
        last_Xn1 = (before_B[:, None, None, None] + query_n1).clamp(max=length - 1)
    seen_XnL = key_L <= last_Xn1
    return seen_XnL if window is None else seen_XnL & (key_L > last_Xn1 - window)


def flash(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKF: Tensor,
    edges: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    rule: AttentionRule,
) -> Tensor:
    """Flash attention over packed documents: [N, H, F]. edges, longest: the documents' boundaries, and the longest
    document, among queries and among keys.

    Values are padded to the width of keys, which the kernel needs; in DeepSeek's latent attention they are narrower.
    """
    narrower = q_NHE.shape[-1] - v_NKF.shape[-1]
    out_NHE: Tensor = flash_attn_varlen_func(
        q_NHE,
        k_NKE,
        F.pad(v_NKF, (0, narrower)),
        *edges,
        *longest,
        softmax_scale=rule.scaling,
        causal=True,
        window_size=(-1, -1) if rule.window is None else (rule.window - 1, 0),
        softcap=rule.softcap or 0.0,
    )
    return out_NHE[..., : v_NKF.shape[-1]]


def _scored(
    q_BHnE: Tensor, k_BKLE: Tensor, v_BKLF: Tensor, rule: AttentionRule, seen_XnL: Tensor | None
) -> Tensor:
    """Attention with a softcap or sinks, which fused kernels lack: all scores are in memory, in float32 at least.
    seen_XnL: None: the keys up to a query's own"""
    heads = q_BHnE.shape[1] // k_BKLE.shape[1]
    k_BHLE, v_BHLF = (x.repeat_interleave(heads, dim=1) for x in (k_BKLE, v_BKLF))
    score_BHnL = q_BHnE @ k_BHLE.transpose(-1, -2) * rule.scale(q_BHnE.shape[-1])
    score_BHnL = score_BHnL.to(torch.promote_types(q_BHnE.dtype, torch.float32))
    if seen_XnL is None:
        seen_XnL = seen(q_BHnE.shape[2], k_BKLE.shape[2], None, q_BHnE.device)
    sinks_H1 = None if rule.sinks_H is None else rule.sinks_H[:, None]
    return attention_weights(score_BHnL, ~seen_XnL, rule.softcap, sinks_H1).to(v_BHLF.dtype) @ v_BHLF


def attention_weights(
    score_XnL: Tensor, hidden_XnL: Tensor, softcap: float | None = None, sinks_Xn: Tensor | None = None
) -> Tensor:
    """[X, n, L]: the softmax over keys, of whatever heads X; see `AttentionRule`. hidden, sinks: of a shape that
    broadcasts; hidden is True at the keys that a query does not see."""
    if softcap is not None:
        score_XnL = softcap * torch.tanh(score_XnL / softcap)
    score_XnL = score_XnL.masked_fill_(hidden_XnL, float("-inf"))
    if sinks_Xn is None:
        return score_XnL.softmax(-1)
    sink_Xn1 = sinks_Xn.to(score_XnL.dtype).expand(score_XnL.shape[:-1])[..., None]
    return torch.cat([score_XnL, sink_Xn1], -1).softmax(-1)[..., :-1]
