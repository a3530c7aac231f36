from __future__ import annotations

import pytest
import torch
from torch import Tensor

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


@pytest.mark.parametrize("chunk", [1, 3, 7, None])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_several_targets_are_those_of_as_many_calls(chunk: int | None, softcap: float | None) -> None:
    hidden, weight, _ = case()
    target = torch.randint(0, 11, (7, 3))
    target[:, 2] = target[:, 0]  # the same token twice: both gradients count
    temperature = torch.tensor([0.6, 1.0, 1.5, 0.6, 0.2, 1.0, 3.0], dtype=torch.float64)
    pull, pull_entropy = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

    def run(logp: Tensor, entropy: Tensor) -> tuple[Tensor, ...]:
        total = (logp * pull).sum() + (entropy * pull_entropy).sum()
        return logp, entropy, *torch.autograd.grad(total, (hidden, weight))

    ours = run(*token_logprobs(hidden, weight, target, temperature, chunk, softcap=softcap))
    columns = [naive(hidden, weight, target[:, m], temperature, softcap) for m in range(3)]
    theirs = run(torch.stack([logp for logp, _ in columns], -1), columns[0][1])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("among", [11, 6, 3])
def test_the_most_likely_tokens_are_found_chunk_by_chunk(among: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.learner.models.logprobs.CHUNK_ELEMENTS", 22)  # two rows
    hidden, weight, _ = case()
    found = most_likely(hidden, weight, torch.ones(7), LikelyTokens(3, among))
    assert torch.equal(found, (hidden @ weight.t())[:, :among].topk(3).indices)


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
