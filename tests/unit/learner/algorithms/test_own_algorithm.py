"""`docs/own_algorithm.md` and `examples/own_algorithm.py`: numbers by hand, and training with both functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from learner_cases import OWN_CRITIC, kept_registries, rewards_batch, small_config

from asyncrl.bench.climb import climb
from asyncrl.config.schema import BatchConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import ConfigError, TrainingError
from asyncrl.learner.algorithms.advantages import advantages
from asyncrl.learner.algorithms.losses.policy_loss import PolicyTerms, policy_loss
from asyncrl.learner.algorithms.registry import needs
from asyncrl.learner.training import requirements

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "examples" / "own_algorithm.py"
OWN = AlgorithmConfig(
    own_advantage=f"{EXAMPLE}:median", own_loss=f"{EXAMPLE}:log_clip", clip_low=0.2, clip_high=0.3
)


@pytest.fixture(scope="module", autouse=True)
def registries() -> Iterator[None]:
    with kept_registries():
        yield


def test_the_median_is_the_baseline() -> None:
    batch = rewards_batch([0.0, 1.0, 9.0], [2.0, 4.0])
    made = advantages(batch, OWN)[batch.loss_mask_N]
    assert made.tolist() == [-1.0, 0.0, 8.0, -1.0, 1.0]


def test_the_loss_stops_at_the_clip() -> None:
    logp_N = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    terms = PolicyTerms(
        logp_N=logp_N,
        proximal_N=torch.tensor([-1.1, -1.5, -0.5]),
        behaviour_N=torch.zeros(3),
        advantages_N=torch.tensor([2.0, 2.0, -1.0]),
        loss_mask_N=torch.ones(3, dtype=torch.bool),
        seq_N=torch.zeros(3, dtype=torch.int64),
        rollouts=1,
    )
    loss = policy_loss(terms, OWN)
    assert loss.loss_N.tolist() == pytest.approx([-0.2, -0.6, -0.2])
    assert loss.clipped_N.tolist() == [False, True, True]
    loss.loss_N.sum().backward()
    assert logp_N.grad is not None
    assert logp_N.grad.tolist() == pytest.approx([-2.0, 0.0, 0.0])


def test_what_they_need_is_known() -> None:
    assert needs(OWN) == {"group"}


def test_a_function_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="own_advantage"):
        needs(dataclasses.replace(OWN, own_advantage=f"{EXAMPLE}:mean"))


WITHOUT_NEEDS = """
from asyncrl.learner.algorithms.registry import advantage

def whitened(batch, config, context):
    return context.gather(batch.rewards_R)[0][batch.seq_N]

@advantage("against_greedy", source="an example", needs={"greedy"})
def against_greedy(batch, config, context):
    return (batch.rewards_R - batch.greedy_R)[batch.seq_N]
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(WITHOUT_NEEDS)
    return path


def test_statistics_over_all_ranks_must_be_declared(own: Path) -> None:
    """Else they would be those of one claim, and differ from rank to rank."""
    with pytest.raises(TrainingError, match=r"declare needs=\{'batch'\}"):
        advantages(rewards_batch([0.0, 1.0]), AlgorithmConfig(own_advantage=f"{own}:whitened"))


def test_what_a_function_declares_it_must_get(own: Path, tmp_path: Path) -> None:
    greedy = AlgorithmConfig(own_advantage=f"{own}:against_greedy")
    with pytest.raises(
        ConfigError, match=r"own_advantage .* greedy rollout .* set algorithm\.advantage=remax"
    ):
        requirements.check(small_config(tmp_path, algorithm=greedy))
    requirements.check(small_config(tmp_path, algorithm=dataclasses.replace(greedy, advantage="remax")))

    alone = {"batch": BatchConfig(groups=2, group_size=1)}
    with pytest.raises(ConfigError, match=r"batch\.group_size = 1"):
        requirements.check(small_config(tmp_path, algorithm=OWN, **alone))
    small_config(tmp_path, algorithm=AlgorithmConfig(own_advantage=f"{own}:whitened"), **alone)


def test_the_example_learns(tmp_path: Path) -> None:
    named = [f"algorithm.own_advantage={EXAMPLE}:median", f"algorithm.own_loss={EXAMPLE}:log_clip"]
    made = climb("grpo", tmp_path, [*named, "run.versions=30", "algorithm.kl_loss.coef=0"])
    assert made.end > 3 * made.start


def test_the_page_shows_the_examples() -> None:
    page = (ROOT / "docs" / "own_algorithm.md").read_text("utf-8")
    sources = [path.read_text("utf-8") for path in (EXAMPLE, OWN_CRITIC)]
    shown = [block.partition("```")[0].strip() for block in page.split("```python")[1:]]
    assert [[block in source for source in sources] for block in shown] == [[True, False]] * 2 + [
        [False, True]
    ]
