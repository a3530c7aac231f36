"""How many bytes the change from one version to the next takes, as a share of the version's."""

from __future__ import annotations

import torch

from asyncrl.sync.delta.delta import add, changes_to_bytes, find_changes, read
from bench.sync.model import shapes
from bench.sync.tensors import drawn

LR = 1e-6
WARM_UP, STEPS = 10, 2
MOST = 1 << 16
"""Elements of one tensor that are trained: more of them change the figure by nothing."""


def delta_bytes_ratio(millions: int, lr: float = LR) -> float:
    """Of the last two of some AdamW steps on fp32 masters, between their bf16 copies. Each step is bit-exact, else
    RuntimeError.

    Gradients keep their signs, so that every step has the full length `lr`: with noisier ones it is shorter, and fewer
    weights change.
    """
    sent = total = 0
    for name, shape in shapes(millions).items():
        changed, whole = _train(drawn(name, shape).view(-1)[:MOST], lr)
        sent, total = sent + changed, total + whole
    return sent / total


def _train(weights: torch.Tensor, lr: float) -> tuple[int, int]:
    """Bytes of the deltas, and of the versions that they stand for."""
    master = weights.float().requires_grad_()
    master.data += 1e-5 * torch.randn_like(master)  # masters lie anywhere between two bf16 numbers
    direction = torch.randn_like(master)
    optimizer = torch.optim.AdamW([master], lr=lr, weight_decay=0.0)
    staged, sent = master.detach().bfloat16(), 0
    for step in range(WARM_UP + STEPS):
        old = master.detach().bfloat16()
        master.grad = direction + 0.1 * torch.randn_like(master)
        optimizer.step()
        new = master.detach().bfloat16()
        record = changes_to_bytes(find_changes(old, new))
        sent += record.numel() if step >= WARM_UP else 0
        (changes,) = read(record, [(staged.numel(), staged.element_size())])
        add(staged, changes)
        if not torch.equal(staged.view(torch.int16), new.view(torch.int16)):
            raise RuntimeError(f"step {step}: the delta does not give the new weights")
    return sent, STEPS * 2 * weights.numel()
