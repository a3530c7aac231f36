"""The proofs without a GPU are proofs: what CUDA refuses is refused, what waits is counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_ops import CudaOps, NotOnCudaError
from make_cuda_ops import TABLE, table_text, torch_list
from pretended_gpu import GPU, GpuTensor, MixedDevicesError, PretendedGpu


@pytest.fixture
def gpu() -> PretendedGpu:
    with PretendedGpu() as pretended:
        yield pretended


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "aten.dot.default does not exist for torch.int64": lambda x: x.long().dot(x.long()),
    "aten.mm.default does not exist for torch.int64": lambda x: x.long().view(4, 8) @ x.long().view(8, 4),
    "more than 16 rows": lambda x: torch._int_mm(x.view(4, 8), x.view(4, 8).t()),
    "columns of the right lie whole": lambda x: torch._int_mm(x.new_zeros(17, 8), x.new_zeros(8, 8)),
    "has no entry": lambda x: torch.ops.aten._convert_weight_to_int4pack_for_cpu(x.view(4, 8).int(), 2),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cuda_lacks_is_refused(why: str) -> None:
    with CudaOps(), pytest.raises(NotOnCudaError, match=why):
        REFUSED[why](torch.ones(32, dtype=torch.int8))


def test_what_cuda_has_runs() -> None:
    x = torch.arange(32, dtype=torch.int8)
    with CudaOps() as ops:
        assert int((x.long() * x.long()).sum()) == sum(i * i for i in range(32))
        assert torch._int_mm(x.new_ones(17, 8), x.new_ones(8, 8).t()).tolist() == [[8] * 8] * 17
    assert "aten::_int_mm" in ops.called


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "_local_scalar_dense": lambda x: int(x.sum()),
    "tolist": lambda x: x.tolist(),
    "to the CPU": lambda x: x.cpu(),
    "copy_": lambda x: torch.empty(4).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "index": lambda x: x[x > 0],
    "repeat_interleave": lambda x: torch.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_for_the_gpu_is_counted_with_its_line(gpu: PretendedGpu, name: str) -> None:
    WAITS[name](torch.ones(4, device="cuda"))
    (wait,) = gpu.waits
    assert wait.startswith(f"{name} at tests/unit/device/test_pretended_gpu.py:")


def test_work_without_waits_has_the_cpus_values_and_gradients(gpu: PretendedGpu) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        part = (x @ w).softmax(-1).clone()
        part[part < 0.1] = 0
        return part[:, 0].log1p().sum()

    x, w = torch.arange(12.0).view(4, 3) / 12, torch.eye(3).requires_grad_()
    expected = loss(x, w)
    expected.backward()
    there = torch.nn.Parameter(w.detach().to(GPU))
    found = loss(x.to(GPU), there)
    found.backward()
    assert gpu.waits == []
    assert isinstance(found, GpuTensor)
    assert found.device == there.grad.device == GPU
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(there.grad.cpu(), w.grad)


def test_views_share_memory_and_in_place_changes_are_seen(gpu: PretendedGpu) -> None:
    memory = torch.zeros(8, dtype=torch.uint8)
    there = gpu.tensor(memory)
    there[4:].view(torch.int32).add_(258)
    assert memory.tolist() == [0, 0, 0, 0, 2, 1, 0, 0]


def test_a_cpu_tensor_meets_none_of_the_gpu(gpu: PretendedGpu) -> None:
    there = torch.ones(3, device="cuda")
    with pytest.raises(MixedDevicesError, match="a CPU tensor meets one of the GPU"):
        there + torch.ones(3)
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        there.numpy()
    assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2]  # as in torch: one number may come from the CPU


@pytest.mark.slow
def test_the_table_is_that_of_the_installed_torch() -> None:
    """Else write it again: python tests/helpers/device/make_cuda_ops.py"""
    assert TABLE.read_text() == table_text(torch_list())
