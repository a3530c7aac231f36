"""Expert parallelism: each rank of a group holds some of the experts of every layer, and tokens travel to theirs.

    router (on every rank)  ▸  rows by expert  ▸  all-to-all  ▸  my experts  ▸  all-to-all  ▸  weighed and summed

Every (token, expert) pair is a row. Each rank sends as many rows as its tokens have pairs with the experts of another,
so nothing is dropped, nothing padded, and every gradient is that of one process: rows and gradients of rows go the same
ways. Weights of the router are applied where the token is.

Any family whose experts transformers keeps in one module with parameters [experts, …] takes part: Mixtral, Qwen2-MoE,
Qwen3-MoE, DeepSeek V2 and V3, and their like. The arithmetic of the experts is transformers' own.

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

from asyncrl.config.schema import Config
from asyncrl.config.sections.rules import require
from asyncrl.learner.parallel.all_to_all import all_to_all
from asyncrl.learner.parallel.mesh import local_part


def experts_of(network: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold all experts of a layer: those whose arithmetic transformers lets one choose."""
    return (module for module in network.modules() if hasattr(module, "_is_expert_parallel"))


def check_experts(policy: nn.Module, config: Config) -> None:
    """Raise ConfigError where experts are to be spread and there are none."""
    require(
        config.learner.parallel.expert == 1 or any(experts_of(policy)),
        "learner.parallel.expert",
        config.learner.parallel.expert,
        f"{config.model.path} has no experts that transformers keeps in one module",
        "set learner.parallel.expert=1",
    )


def spread_experts(network: nn.Module, mesh: DeviceMesh) -> None:
    """Leave this rank its part of the experts, as DTensors, and send tokens to where their experts are.

    mesh: its first axis is that of the experts, whose number must be a multiple of its ranks. Along another one (tp)
    each rank sends what tokens it has, and has the same experts.
    """
    placements = [Shard(0)] + [Replicate()] * (mesh.ndim - 1)
    for module in experts_of(network):
        for name, parameter in module.named_parameters(recurse=False):
            mine = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(mine, requires_grad=parameter.requires_grad))
        # FSDP calls `module.forward`, whatever it is then.
        module.forward = partial(_forward, module, mesh.get_group(0))


def _forward(
    module: nn.Module, group: ProcessGroup, hidden_nD: Tensor, expert_nk: Tensor, weight_nk: Tensor
) -> Tensor:
    """What transformers' experts answer: [n, D], the weighed sum of what its experts make of each token."""
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
    """[M] the expert of each row received, from 0 on this rank: of every rank those of expert 0, then of 1, …"""
    expert_Pe = torch.arange(received_Pe.shape[1], device=received_Pe.device).expand_as(received_Pe)
    return expert_Pe.flatten().repeat_interleave(received_Pe.flatten())


class _MyExperts:
    """A module of experts, with the parameters that are here and no others."""

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
