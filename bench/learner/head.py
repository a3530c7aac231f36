"""python -m bench.learner.head: the most memory that log-probs, entropies and their gradients take at a vocabulary of
32k, the way asyncrl makes them and the plain way. One process a measurement."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from asyncrl.learner.models.logprobs import token_logprobs
from bench.process import Talk

TOKENS, HIDDEN, VOCABULARY = 2048, 256, 32_768


def main() -> None:
    torch.set_num_threads(1)
    talk = Talk()
    way = {"chunked": chunked, "naive": naive}[talk.hears()]
    torch.manual_seed(0)
    way(*_inputs(8))  # libraries come into memory
    inputs = _inputs(TOKENS)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: proc(5)
    logp = way(*inputs)
    talk.tell({"bytes": _resident("VmHWM") - before, "logp": logp})


def chunked(hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, advantage_T: Tensor) -> float:
    logp_T, entropy_T = token_logprobs(hidden_TD, weight_VD, target_T, torch.ones_like(advantage_T))
    return _backward(logp_T, entropy_T, advantage_T)


def naive(hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, advantage_T: Tensor) -> float:
    logp_TV = (hidden_TD @ weight_VD.t()).float().log_softmax(-1)
    entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    return _backward(logp_TV.gather(1, target_T[:, None])[:, 0], entropy_T, advantage_T)


def _backward(logp_T: Tensor, entropy_T: Tensor, advantage_T: Tensor) -> float:
    (0.01 * entropy_T.sum() - (logp_T * advantage_T).sum()).backward()
    return float(logp_T.detach().sum())


def _inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden_TD = torch.randn(tokens, HIDDEN).requires_grad_()
    weight_VD = (0.05 * torch.randn(VOCABULARY, HIDDEN)).requires_grad_()
    return hidden_TD, weight_VD, torch.randint(0, VOCABULARY, (tokens,)), torch.randn(tokens)


def _resident(which: str) -> int:
    """VmRSS: bytes of this process now · VmHWM: the most since the peak began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(which))


if __name__ == "__main__":
    main()
