"""The registries name exactly what the configuration can ask for, and what each of it needs."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from asyncrl.config.sections.algorithm import (
    GROUP_ADVANTAGES,
    AlgorithmConfig,
    CorrectionConfig,
    KlLossConfig,
    ShapingConfig,
    TeacherLossConfig,
)
from asyncrl.learner.algorithms.registry import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
    REJECTIONS,
    Algorithm,
    Need,
    advantage,
    needs,
)

REGISTRIES = [
    (ADVANTAGES, AlgorithmConfig, "advantage"),
    (LOSSES, AlgorithmConfig, "loss"),
    (CORRECTIONS, CorrectionConfig, "kind"),
    (REJECTIONS, CorrectionConfig, "reject"),
]
by_key = pytest.mark.parametrize(
    ("entries", "section", "key"), REGISTRIES, ids=[key for *_, key in REGISTRIES]
)


@by_key
def test_every_literal_is_there_and_no_other(
    entries: Mapping[str, Algorithm[Any]], section: type, key: str
) -> None:
    assert set(entries) == set(get_args(get_type_hints(section)[key]))


@by_key
def test_every_entry_says_what_it_is(entries: Mapping[str, Algorithm[Any]], section: type, key: str) -> None:
    for name, entry in entries.items():
        assert entry.source or name == "none", name
        assert (entry.function.__doc__ or "").split("\n")[0].strip(), name
        assert entry.needs <= set(get_args(Need)), name


def test_the_configuration_knows_who_compares_within_groups() -> None:
    assert set(GROUP_ADVANTAGES) == {name for name, entry in ADVANTAGES.items() if "group" in entry.needs}


def test_a_literal_is_taken_once() -> None:
    with pytest.raises(ValueError, match="two algorithms are called 'grpo'"):
        advantage("grpo", source="")(lambda: None)


def test_a_script_that_is_executed_twice_notes_its_functions_again(tmp_path: Path) -> None:
    """As `__main__`, and as the file that the configuration names."""
    script = tmp_path / "script.py"
    script.write_text(
        "from asyncrl.learner.algorithms.registry import advantage\n"
        "@advantage('twice', source='', needs={'batch'})\n"
        "def twice(batch, config, context): ...\n"
    )
    try:
        first = runpy.run_path(str(script), run_name="__main__")["twice"]
        assert ADVANTAGES["twice"].function is first
        assert needs(AlgorithmConfig(own_advantage=f"{script}:twice")) == {"batch"}
        assert ADVANTAGES["twice"].function is not first
    finally:
        del ADVANTAGES["twice"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AlgorithmConfig(), {"group"}),
        (AlgorithmConfig(advantage="gae"), {"critic", "batch"}),
        (AlgorithmConfig(advantage="remax", loss="reinforce"), {"greedy"}),
        (AlgorithmConfig(loss="clip_cov"), {"group", "batch", "proximal"}),
        (AlgorithmConfig(advantage="optimal_token_baseline"), {"group", "squares", "proximal"}),
        (AlgorithmConfig(advantage="off_policy_baseline"), {"group", "proximal"}),
        (AlgorithmConfig(advantage="off_policy_step_baseline"), {"group", "steps", "proximal"}),
        (AlgorithmConfig(lm_coef=0.1), {"group", "batch"}),
        (AlgorithmConfig(kl_loss=KlLossConfig(coef=0.1)), {"group", "reference"}),
        (AlgorithmConfig(teacher_loss=TeacherLossConfig(coef=0.1)), {"group", "teacher"}),
        (AlgorithmConfig(shaping=ShapingConfig(kl_coef=0.1)), {"group", "reference"}),
        (
            AlgorithmConfig(shaping=ShapingConfig(kl_coef=0.1, kl_target=1.0)),
            {"group", "reference", "batch"},
        ),
        (AlgorithmConfig(shaping=ShapingConfig(resample="pow")), {"group", "batch"}),
        (
            AlgorithmConfig(proximal="frozen", correction=CorrectionConfig(kind="tis", normalise=True)),
            {"group", "batch", "proximal"},
        ),
        (
            AlgorithmConfig(proximal="frozen", correction=CorrectionConfig(reject="m2po")),
            {"group", "batch", "proximal"},
        ),
    ],
)
def test_needs_are_those_of_all_parts(config: AlgorithmConfig, expected: set[Need]) -> None:
    assert needs(config) == expected
