from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.learner.algorithms.losses.policy_loss import forward_kl
from asyncrl.learner.models.logprobs import LikelyTokens, most_likely, token_logprobs


def naive(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature[:, None]).log_softmax(-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def case(rows: int = 7, size: int = 5, vocabulary: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(rows, size, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, size, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, vocabulary, (rows,))


@pytest.mark.parametrize("chunk", [1, 3, 7, None])
@pytest.mark.parametrize("temperatures", [[1.0] * 7, [0.6, 1.0, 1.5, 0.6, 0.2, 1.0, 3.0]])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_equals_the_naive_way(chunk: int | None, temperatures: list[float], softcap: float | None) -> None:
    hidden, weight, target = case()
    temperature = torch.tensor(temperatures, dtype=torch.float64)
    pull_logp, pull_entropy = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

    def run(logp: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        total = (logp * pull_logp).sum() + (entropy * pull_entropy).sum()
        return logp, entropy, *torch.autograd.grad(total, (hidden, weight))

    ours = run(*token_logprobs(hidden, weight, target, temperature, chunk, softcap=softcap))
    theirs = run(*naive(hidden, weight, target, temperature, softcap))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_against_finite_differences(output: int, softcap: float | None) -> None:
    hidden, weight, target = case(rows=4)
    temperature = torch.tensor([0.8, 1.0, 2.0, 0.8], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, target, temperature, 3, softcap=softcap)[output], (hidden, weight)
    )


def outcomes(logits: Tensor, likely: Tensor) -> Tensor:
    """The naive way: log-probs of these tokens, and of all others."""
    others = torch.ones_like(logits, dtype=torch.bool).scatter(1, likely, value=False)
    rest = logits.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(1, likely), rest], -1) - logits.logsumexp(-1, keepdim=True)


@pytest.mark.parametrize("chunk", [1, 3, 7, None])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sharp", [1.0, 6.0], ids=["flat", "others have almost nothing"])
def test_outcomes_are_likely_tokens_and_all_others(
    chunk: int | None, softcap: float | None, sharp: float
) -> None:
    hidden, weight, target = case()
    temperature = torch.tensor([0.6, 1.0, 1.5, 0.6, 0.2, 1.0, 3.0], dtype=torch.float64) / sharp
    logits = hidden @ weight.t() if softcap is None else softcap * torch.tanh(hidden @ weight.t() / softcap)
    logits = logits / temperature[:, None]
    likely = logits.topk(3).indices
    target[:3] = likely[:3, 1]  # the target may be among them, and both gradients count
    pull, pull_entropy = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

    def run(logp: Tensor, entropy: Tensor, outcome: Tensor) -> tuple[Tensor, ...]:
        every = torch.cat([logp[:, None], outcome], -1)
        total = (every * pull).sum() + (entropy * pull_entropy).sum()
        return every, entropy, *torch.autograd.grad(total, (hidden, weight), retain_graph=True)

    ours = run(*token_logprobs(hidden, weight, target, temperature, chunk, softcap=softcap, likely_TK=likely))
    theirs = run(*naive(hidden, weight, target, temperature, softcap), outcomes(logits, likely))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_policy_that_rules_all_others_out_is_drawn_to_them() -> None:
    """In float32, where 1 less the likely ones would be 0: the teacher has a fifth for the others."""
    logits = torch.tensor([[20.0, 19.0, -5.0, -6.0]], requires_grad=True)
    teacher = torch.tensor([[0.5, 0.3, 0.2]]).log()
    _, _, mine = token_logprobs(
        logits,
        torch.eye(4),
        torch.zeros(1, dtype=torch.int64),
        torch.ones(1),
        likely_TK=torch.tensor([[0, 1]]),
    )
    (slope,) = torch.autograd.grad(forward_kl(mine, teacher).sum(), logits)
    expected = torch.tensor([20.0, 19.0, -5.0, -6.0]).softmax(-1) - torch.tensor([0.5, 0.3, 0.0, 0.0])
    expected[2:] -= 0.2 * torch.tensor([-5.0, -6.0]).softmax(-1)
    torch.testing.assert_close(slope[0], expected, atol=1e-5, rtol=0)


@given(*[st.lists(st.floats(-6, 6), min_size=6, max_size=6)] * 2, st.integers(1, 6))
def test_the_forward_kl_is_bounded_by_that_over_the_vocabulary(
    mine: list[float], teacher: list[float], count: int
) -> None:
    mine_V, teacher_V = (torch.tensor([each], dtype=torch.float64) for each in (mine, teacher))
    likely = teacher_V.topk(count).indices
    (found,) = forward_kl(outcomes(mine_V, likely), outcomes(teacher_V, likely)).tolist()
    whole = (teacher_V.softmax(-1) * (teacher_V.log_softmax(-1) - mine_V.log_softmax(-1))).sum()
    assert -1e-9 <= found <= float(whole) + 1e-9
    assert found == pytest.approx(float(whole), abs=1e-9) or count < 5


@pytest.mark.parametrize("count", [3, 11])
@pytest.mark.parametrize("among", [11, 6, 3])
def test_the_most_likely_tokens_are_found_chunk_by_chunk(
    among: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.learner.models.logprobs.CHUNK_ELEMENTS", 22)  # two rows
    hidden, weight, target = case()
    count, logits = min(count, among), hidden @ weight.t()
    found = most_likely(hidden, weight, target, torch.ones(7), LikelyTokens(count, among))
    likely = logits[:, :among].topk(count).indices
    assert torch.equal(found[:, 2 + count :], likely.double())
    torch.testing.assert_close(found[:, 0], naive(hidden, weight, target, torch.ones(7))[0])
    some = (
        slice(1, 2 + count) if count < 11 else slice(1, 1 + count)
    )  # nothing is left of the whole vocabulary
    torch.testing.assert_close(found[:, some], outcomes(logits, likely)[:, : some.stop - 1])
    assert found[:, 1 + count].exp().max() < 1e-300 or count < 11


def test_no_rows_still_reach_both_inputs() -> None:
    hidden, weight, _ = case(rows=0)
    logp, _ = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), torch.ones(0))
    _, grad_weight = torch.autograd.grad(logp.sum(), (hidden, weight))
    assert (grad_weight == 0).all()


def test_half_precision_inputs_give_float32_results() -> None:
    hidden, weight, target = case()
    ours, _ = token_logprobs(hidden.bfloat16(), weight.bfloat16(), target, torch.ones(7))
    theirs, _ = naive(hidden, weight, target, torch.ones(7))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), theirs, atol=0.1, rtol=0)
