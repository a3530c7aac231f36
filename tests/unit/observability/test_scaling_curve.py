"""The sigmoid of held-out scores: recovered where it is known, honest where there is none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.cli import main
from asyncrl.observability.rows import STEP_S, MetricRows
from asyncrl.observability.scaling_curve import LEAST_POINTS, Sigmoid, fit, forecast, points_of

CURVES = st.builds(
    Sigmoid,
    start=st.floats(0.0, 0.3),
    asymptote=st.floats(0.5, 1.0),
    midpoint=st.floats(20.0, 120.0),
    exponent=st.floats(0.8, 4.0),
)


def test_the_equation_of_the_paper() -> None:
    """By hand: half of the gain at the midpoint; at three times it, with exponent 2, nine tenths."""
    curve = Sigmoid(start=0.2, asymptote=0.6, midpoint=10.0, exponent=2.0)
    assert [curve.at(x) for x in (0.0, 10.0, 30.0)] == pytest.approx([0.2, 0.4, 0.56])


@given(CURVES)
def test_a_curve_without_noise_is_found_again(curve: Sigmoid) -> None:
    points = [(float(x), curve.at(x)) for x in range(0, 201, 10)]
    found = fit(points)
    assert found.error(points) < 1e-3
    assert found.at(400.0) == pytest.approx(curve.at(400.0), abs=0.02)


def test_the_first_half_predicts_the_second_one_better_than_its_last_score() -> None:
    rng, curve = np.random.default_rng(0), Sigmoid(0.1, 0.8, 60.0, 2.0)
    found = forecast([(float(x), curve.at(x) + rng.normal(0.0, 0.005)) for x in range(0, 201, 5)], most=1.0)
    assert found.half == 21
    assert found.early_error < 0.03 < 0.06 < found.carried_error
    assert found.whole.asymptote == pytest.approx(0.8, abs=0.03)


def test_no_asymptote_is_above_the_highest_score_there_can_be() -> None:
    line = [(float(x), x / 100.0) for x in range(80)]
    assert fit(line).asymptote > 1.0
    assert fit(line, most=1.0).asymptote <= 1.0


@pytest.mark.parametrize(
    "scores", [[0.0] * 12, [0.5] * 12, [0.9 - at / 20 for at in range(12)], [0.1, 0.9] * 6]
)
def test_a_run_that_does_not_climb_has_a_finite_fit(scores: list[float]) -> None:
    found = forecast([(float(at), score) for at, score in enumerate(scores)])
    assert all(
        math.isfinite(value) for value in (found.whole.at(24.0), found.early_error, found.carried_error)
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two versions an hour, an evaluation every second version."""
    curve = Sigmoid(0.1, 0.9, 10.0, 2.0)
    rows = [{"version": version, STEP_S: 1800.0} for version in range(1, 41)]
    rows += [{"version": version, "eval/accuracy": curve.at(version)} for version in range(0, 41, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_points_are_by_version_or_by_hour(run: Path) -> None:
    rows = MetricRows(run)
    rows.read()
    versions, hours = (points_of(rows, "eval/accuracy", hours) for hours in (False, True))
    assert [x for x, _ in versions] == list(range(0, 41, 2))
    assert [x for x, _ in hours] == pytest.approx([version / 2 for version in range(0, 41, 2)])


def test_the_command_prints_both_fits(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(run)]) == 0
    text = capsys.readouterr().out
    assert "21 evaluations, 0 to 40 versions" in text
    assert "\nall                  0.900        10      2.00   0.000\n" in text
    assert main(["fit", str(run), "--hours", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["half"], round(found["whole"]["midpoint"], 2)) == (11, 5.0)


def test_a_run_with_too_few_evaluations_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(run), "--metric", "eval/other"]) == 2
    error = capsys.readouterr().err
    assert f"0 evaluations are too few for a fit; {LEAST_POINTS} are needed" in error
    assert "eval/accuracy" in error
