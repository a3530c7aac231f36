"""Products of half-precision matrices in float32."""

from __future__ import annotations

import pytest
import torch
from pretended_gpu import PretendedGpu

from asyncrl.device.products import wide_product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_is_not_rounded_to_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(2, 3, 64).to(dtype), torch.randn(5, 64).to(dtype)
    expected = (left.double() @ right.double().t()).float()
    here = wide_product(left, right)
    with PretendedGpu() as gpu:
        there = wide_product(gpu.tensor(left), gpu.tensor(right)).memory
        assert gpu.waits == []
    for found in (here, there):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
