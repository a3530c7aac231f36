"""The experts of one rank in two matrices: each product is one call for all experts (a grouped GEMM).

    rows of expert 0 │ of expert 1 │ …        [M, D], sorted by Megatron's dispatcher
    fc1   gate and up of expert 0 ▁ of expert 1 ▁ …     [e · 2F, D]
    fc2   down of expert 0 ▁ of expert 1 ▁ …            [e · D, F]

Megatron's own grouped experts need TransformerEngine or the package grouped_gemm. torch's grouped_mm needs neither. In
bfloat16 it is one kernel on Hopper and on Blackwell's B200, and a loop elsewhere.

Axes:  M rows: a token for each of its experts · e experts on this rank · D hidden size · F rows of this rank of an
expert's gate
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from asyncrl.device.copies import on_device


class GroupedExperts(MegatronModule):
    """Megatron's experts: (rows, rows of each expert, weights of rows) → (outputs [M, D], no bias)."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config)
        self._experts = num_local_experts
        rows = (config.moe_ffn_hidden_size or config.ffn_hidden_size) // pg_collection.expt_tp.size()
        self.grouped_fc1 = self._parameter(2 * rows, config.hidden_size)
        self.grouped_fc2 = self._parameter(config.hidden_size, rows)

    def _parameter(self, outputs: int, inputs: int) -> nn.Parameter:
        config = self.config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        shape = (self._experts * outputs, inputs)
        made = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        # No other rank of tp has these elements: the norm of the gradient counts all of them.
        set_tensor_model_parallel_attributes(made, True, 0, 1)
        as_megatron: Any = made
        as_megatron.allreduce = config.expert_model_parallel_size == 1
        return made

    def forward(self, rows_MD: Tensor, counts_e: Tensor, weight_M: Tensor) -> tuple[Tensor, None]:
        ends_e = on_device(counts_e.cumsum(0).int(), rows_MD.device)
        gate_MF, up_MF = self._product(rows_MD, self.grouped_fc1, ends_e).chunk(2, -1)
        inner_MF = (F.silu(gate_MF) * up_MF * weight_M[:, None]).to(rows_MD.dtype)
        return self._product(inner_MF, self.grouped_fc2, ends_e), None

    def _product(self, rows_MI: Tensor, weight: Tensor, ends_e: Tensor) -> Tensor:
        """Rows of each expert times its matrix: [M, O], from a weight [e · O, I]."""
        return F.grouped_mm(rows_MI, weight.unflatten(0, (self._experts, -1)).mT, offs=ends_e)
