"""Attention under the rules of families, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from flash_stand_in import flash_attn_varlen_func
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.models import attention
from asyncrl.models.attention import AttentionRule, dense_attention, flash, seen


def test_a_capped_score_by_hand() -> None:
    """One head of size 1: the second query has scores 3 and 6, which a cap of 2 makes 2 tanh 1.5 and 2 tanh 3."""
    q, k, v = (torch.tensor(values)[None, None, :, None] for values in ([1.0, 3.0], [1.0, 2.0], [10.0, 20.0]))
    out = dense_attention(q, k, v, AttentionRule(scaling=1.0, softcap=2.0))[0, 0, :, 0]
    second = 1 / (1 + math.exp(2 * math.tanh(1.5) - 2 * math.tanh(3.0)))
    assert out.tolist() == pytest.approx([10.0, 10.0 + 10.0 * second])


def test_capped_scores_of_half_precision_are_not_rounded_again() -> None:
    """64 and 66 are numbers of bfloat16; what a cap of 50 makes of them, 42.84 and 43.35, lies between its numbers."""
    q, k, v = (
        torch.tensor(values).bfloat16()[None, None, :, None]
        for values in ([1.0, 1.0], [64.0, 66.0], [0.0, 1.0])
    )
    out = float(dense_attention(q, k, v, AttentionRule(scaling=1.0, softcap=50.0))[0, 0, 1, 0])
    exact = 1 / (1 + math.exp(50 * math.tanh(64 / 50) - 50 * math.tanh(66 / 50)))
    assert out == pytest.approx(exact, abs=2**-9)


@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(0.7), AttentionRule(None, 2, 1.5)])
def test_flash_attention_is_requested_as_dense_attention_computes(
    rule: AttentionRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two documents; the slice of the first one has 3 of its 5 tokens. Values are narrower than keys."""
    monkeypatch.setattr(attention, "flash_attn_varlen_func", flash_attn_varlen_func)
    q, k, v = torch.randn(5, 2, 4), torch.randn(7, 2, 4), torch.randn(7, 2, 3)
    found = flash(q, k, v, (torch.tensor([0, 3, 5]), torch.tensor([0, 5, 7])), (3, 5), rule)
    parts = zip(q.split([3, 2]), k.split([5, 2]), v.split([5, 2]), strict=True)
    expected = [
        dense_attention(*(x.transpose(0, 1)[None] for x in part), rule)[0].transpose(0, 1) for part in parts
    ]
    torch.testing.assert_close(found, torch.cat(expected))


def test_a_window_of_one_sees_itself_alone() -> None:
    q, k, v = (torch.randn(2, 4, 5, 3) for _ in range(3))
    for softcap in (None, 2.0):
        torch.testing.assert_close(dense_attention(q, k, v, AttentionRule(window=1, softcap=softcap)), v)


@given(
    n=st.integers(1, 6),
    before=st.integers(0, 4),
    scaling=st.sampled_from([None, 0.7]),
    window=st.none() | st.integers(1, 12),
    softcap=st.none() | st.floats(0.5, 20.0),
    shared=st.sampled_from([1, 2]),
    sinks=st.booleans(),
)
def test_attention_is_the_softmax_of_what_is_seen(
    n: int,
    before: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    shared: int,
    sinks: bool,
) -> None:
    """Query by query, key by key; `shared` query heads to a key head, values of a width of their own; a sink is one
    more key, of value 0."""
    length, heads, generator = before + n, 2, torch.Generator().manual_seed(n)
    q = torch.randn(1, heads * shared, n, 4, dtype=torch.float64, generator=generator)
    k = torch.randn(1, heads, length, 4, dtype=torch.float64, generator=generator)
    v = torch.randn(1, heads, length, 3, dtype=torch.float64, generator=generator)
    sinks_H = torch.randn(heads * shared, dtype=torch.float64, generator=generator) if sinks else None
    out = dense_attention(q, k, v, AttentionRule(scaling, window, softcap, sinks_H))
    for head in range(heads * shared):
        for i in range(n):
            at = before + i
            low = 0 if window is None else max(0, at - window + 1)
            score = (scaling or 0.5) * k[0, head // shared, low : at + 1] @ q[0, head, i]
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if sinks_H is not None:
                score = torch.cat([score, sinks_H[head : head + 1]])
            expected = score.softmax(-1)[: at + 1 - low] @ v[0, head // shared, low : at + 1]
            torch.testing.assert_close(out[0, head, i], expected)
    assert seen(n, length, window).sum(-1).tolist() == [
        min(before + i + 1, window or length) for i in range(n)
    ]
