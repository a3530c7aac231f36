"""Expert parallelism: each rank of a group holds some experts of every layer, and tokens are sent to their experts.

    router (on every rank)  ▸  rows by expert  ▸  all-to-all  ▸  local experts  ▸  all-to-all  ▸  weighted sum

Every (token, expert) pair is a row. No row is dropped and none is padding, and gradients of rows take the way back, so
every gradient is that of one process. The router's weights are applied on the token's rank.

This works for families whose experts transformers keeps in one module with parameters [experts, …]: Mixtral, Qwen2-MoE,
Qwen3-MoE, DeepSeek V2 and V3, and similar ones. The experts' arithmetic is transformers' own.

Axes:  n tokens of this rank · k experts of each token · E experts · e of them on each rank · P ranks · S rows sent
(n · k) · M rows received · D hidden size
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers.integrations.moe import grouped_mm_experts_forward

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.learner.parallel.collectives import all_to_all
from asyncrl.learner.parallel.mesh import local_part


def expert_modules(network: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold all experts of a layer, which transformers marks by this attribute."""
    return (module for module in network.modules() if hasattr(module, "_is_expert_parallel"))


def check_experts(policy: nn.Module, config: Config) -> None:
    """Raises ConfigError if experts are to be spread and the policy has none."""
    require(
        config.learner.parallel.expert == 1 or any(expert_modules(policy)),
        "learner.parallel.expert",
        config.learner.parallel.expert,
        f"{config.model.path} has no experts that transformers keeps in one module",
        "set learner.parallel.expert=1",
    )


def spread_experts(network: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the experts over the ranks of the mesh's first axis, as DTensors, and exchange tokens in their forward. The
    size of that axis must divide the experts; along a second one (tp) ranks have the same experts and different tokens.
    """
    placements = [Shard(0)] + [Replicate()] * (mesh.ndim - 1)
    for module in expert_modules(network):
        for name, parameter in module.named_parameters(recurse=False):
            mine = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(mine, requires_grad=parameter.requires_grad))
        # FSDP calls the `module.forward` of that moment.
        module.forward = partial(_forward, module, mesh.get_group(0))


def _forward(
    module: nn.Module, group: ProcessGroup, hidden_nD: Tensor, expert_nk: Tensor, weight_nk: Tensor
) -> Tensor:
    """[n, D]: the weighted sum of its experts' outputs for each token, as transformers' own forward."""
    mine = _MyExperts(module)
    expert_S, order_S = expert_nk.flatten().sort(stable=True)
    sent_Pe = torch.bincount(expert_S, minlength=group.size() * mine.num_experts).view(group.size(), -1)
    received_Pe = torch.empty_like(sent_Pe)
    dist.all_to_all_single(received_Pe, sent_Pe, group=group)
    sent, received = sent_Pe.sum(1).tolist(), received_Pe.sum(1).tolist()
    rows_MD = all_to_all(hidden_nD[order_S // expert_nk.shape[1]], group, sent, received)
    made_MD = mine(rows_MD, experts_of_rows(received_Pe))
    back_SD = all_to_all(made_MD, group, received, sent)
    each_SD = torch.empty_like(back_SD).index_copy(0, order_S, back_SD)
    weighed = each_SD.view(*expert_nk.shape, -1) * weight_nk[..., None]
    return weighed.sum(1).to(hidden_nD.dtype)


def experts_of_rows(received_Pe: Tensor) -> Tensor:
    """[M] the local number of each received row's expert. The rows of each rank are in the order of experts."""
    expert_Pe = torch.arange(received_Pe.shape[1], device=received_Pe.device).expand_as(received_Pe)
    return expert_Pe.flatten().repeat_interleave(received_Pe.flatten())


class _MyExperts:
    """A module of experts with this rank's parameters only."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._here = {
            name: local_part(parameter) for name, parameter in module.named_parameters(recurse=False)
        }
        self.num_experts = len(next(iter(self._here.values())))

    def __getattr__(self, name: str) -> Any:
        return self._here[name] if name in self._here else getattr(self._module, name)

    def __call__(self, rows_MD: Tensor, expert_M: Tensor) -> Tensor:
        once_M1 = rows_MD.new_ones(len(rows_MD), 1)
        return grouped_mm_experts_forward(cast(nn.Module, self), rows_MD, expert_M[:, None], once_M1)
