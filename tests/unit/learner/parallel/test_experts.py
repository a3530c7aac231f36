"""Which modules hold experts, which rows are whose, and what is refused; the rest is in test_context_and_experts.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spread_cases import MIXTURES, Case, config_of, make_models

from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.models.networks import load_network
from asyncrl.learner.parallel.experts import check_experts, expert_modules, experts_of_rows


def test_rows_come_by_rank_and_then_by_expert() -> None:
    """From rank 0 one row for expert 0 and two for expert 1, from rank 1 one for expert 1."""
    assert experts_of_rows(torch.tensor([[1, 2], [0, 1]])).tolist() == [0, 1, 1, 1]
    assert experts_of_rows(torch.tensor([[0, 0], [0, 0]])).tolist() == []


def test_every_layer_of_experts_is_found_and_a_dense_policy_refused(tmp_path: Path) -> None:
    make_models(tmp_path)
    for family in MIXTURES:
        config = config_of(tmp_path, Case(ParallelConfig(expert=2), family))
        policy = load_network("policy", config)
        assert len(list(expert_modules(policy))) == (
            1 if family == "deepseek_v3" else 2
        )  # its first layer is dense
        check_experts(policy, config)
    dense = config_of(tmp_path, Case(ParallelConfig(expert=2)))
    with pytest.raises(ConfigError, match="has no experts"):
        check_experts(load_network("policy", dense), dense)
