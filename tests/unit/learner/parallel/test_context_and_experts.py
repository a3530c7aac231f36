"""Tokens of a micro-batch and experts of a layer, spread over two and four gloo processes: the same as on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from spread_cases import MIXTURES, Case, Outcome, config_of, make_models, put_together, trained
from transformers import AutoModelForCausalLM

from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.system.rank_process import end_rank

RUNS = {
    "two": {
        "ulysses": Case(ParallelConfig(context=2)),
        "all_gather": Case(ParallelConfig(context=2, context_way="all_gather")),
        "critic": Case(ParallelConfig(context=2, context_way="all_gather"), critic=True),
    }
    | {family: Case(ParallelConfig(expert=2), family) for family in MIXTURES},
    "four with contexts": {
        "ulysses over shards": Case(ParallelConfig(context=2)),
        "ulysses over tensors": Case(ParallelConfig(context=2, tensor=2)),
        "all_gather over tensors": Case(ParallelConfig(context=2, context_way="all_gather", tensor=2)),
        "more ranks than key heads": Case(ParallelConfig(context=4)),
    },
    "four with experts": {
        "experts over shards": Case(ParallelConfig(expert=2), "qwen3_moe"),
        "experts in replicas": Case(ParallelConfig(expert=2, replicate=2), "mixtral"),
        "experts over tensors": Case(ParallelConfig(expert=2, tensor=2), "qwen3_moe"),
        "experts over contexts": Case(ParallelConfig(expert=4, context=2), "deepseek_v3"),
    },
}
"""By what the ranks of one start do: cases by name."""
SAVED = {"two": "qwen3_moe", "four with experts": "experts over shards"}

Ran = Callable[[str], Path]


def rank_main(folder: Path) -> None:
    for name, case in RUNS[folder.name].items():
        backend, outcome = trained(config_of(folder, case))
        torch.save(outcome, folder / f"{name}.{backend.rank}.pt")
        if name == SAVED.get(folder.name):
            backend.save(folder / "saved")
            backend.export_hf(folder / "exported")
    end_rank()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What the ranks of one of RUNS have left."""
    base = tmp_path_factory.mktemp("spread")

    @cache
    def run(name: str) -> Path:
        folder = base / name
        folder.mkdir()
        make_models(folder)
        run_ranks("test_context_and_experts:rank_main", folder, 2 if name == "two" else 4)
        return folder

    return run


def cases() -> Iterator[object]:
    for run, of_run in RUNS.items():
        for name, case in of_run.items():
            yield pytest.param(run, name, case, id=name)


def outcomes(folder: Path, name: str) -> list[Outcome]:
    """Of all ranks."""
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob(f"{name}.[0-9].pt"))]


@pytest.mark.parametrize(("run", "name", "case"), cases())
def test_spread_training_is_that_of_one_process(ran: Ran, run: str, name: str, case: Case) -> None:
    every = outcomes(ran(run), name)
    alone, expected = trained(config_of(ran(run), case, alone=True))
    for outcome in every:
        for values, ours in zip(outcome.values, expected.values, strict=True):
            assert values == pytest.approx(ours, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(outcome.following, expected.following, atol=1e-5, rtol=0)
    whole = put_together(every)
    assert whole.keys() == alone.local_tensors().keys()
    for parameter, tensor in alone.local_tensors().items():
        assert isinstance(tensor, torch.Tensor)
        torch.testing.assert_close(whole[parameter], tensor, atol=2e-6, rtol=0)


def test_no_rank_holds_the_experts_of_another(ran: Ran) -> None:
    """Two experts on each of two ranks."""
    held = [
        {
            int(name.split(".")[5])
            for name, param in outcome.layout.items()
            if ".experts." in name and param.boxes
        }
        for outcome in outcomes(ran("two"), "qwen3_moe")
    ]
    assert held == [{0, 1}, {2, 3}]


@pytest.mark.parametrize(("run", "name"), SAVED.items())
def test_checkpoints_and_exports_of_spread_experts_are_whole(ran: Ran, run: str, name: str) -> None:
    folder = ran(run)
    whole = put_together(outcomes(folder, name))
    loaded = FsdpBackend(config_of(folder, RUNS[run][name], alone=True))
    loaded.load(folder / "saved")
    for parameter, tensor in loaded.local_tensors().items():
        assert torch.equal(torch.as_tensor(tensor), whole[parameter])
    exported = AutoModelForCausalLM.from_pretrained(folder / "exported")
    inside = dict(loaded.policy.network.named_parameters())
    for parameter, tensor in exported.named_parameters():
        assert torch.equal(tensor, inside[f"causal_lm.{parameter}"])
