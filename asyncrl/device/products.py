"""Products of half-precision matrices that stay in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.device.accelerator import CUDA


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """[…, K] · [V, K]ᵀ in float32 at least, from operands of one dtype. CUDA takes half precision and gives float32;
    elsewhere the operands are widened."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right.t()
    if left.device.type == CUDA:
        flat = left.reshape(-1, left.shape[-1])
        return torch.mm(flat, right.t(), out_dtype=torch.float32).reshape(*left.shape[:-1], -1)
    return left.float() @ right.float().t()
