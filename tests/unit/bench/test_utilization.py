"""The report of `asyncrl bench utilization`, on rows made up by hand."""

from __future__ import annotations

import io
from collections.abc import Mapping
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.bench.report import T_95, Length, Ratio, draw, print_report, verdict
from asyncrl.bench.utilization import main, modes, schedule, summarise
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config, GeneratorConfig, LearnerConfig, QueueConfig
from asyncrl.telemetry.sinks import JsonlSink


def step(
    version: int, seconds: float, generate: float, learn: float, staleness: float = 0.0
) -> dict[str, Any]:
    """A version of 10 rollouts of 5 tokens, whose reward is a tenth of its number."""
    return {
        "version": version,
        "perf/step_s": seconds,
        "train/rollouts": 10,
        "train/tokens": 50,
        "rollout/reward/mean": version / 10,
        "train/staleness/mean": staleness,
        "train/staleness/max": staleness,
        "perf/time/compute/forward_backward": learn,
        "perf/time/wait/groups": seconds - learn,
        "perf/generator/time/compute": generate,
        "perf/generator/time/wait/tasks": seconds - generate,
    }


ROWS = {
    "sync_split": [step(v, 5.0, generate=2.0, learn=3.0) for v in range(1, 11)],
    "sync_colocated": [step(v, 4.0, generate=1.5, learn=2.5) for v in range(1, 11)],
    "one_step": [step(v, 3.5, generate=2.0, learn=3.0, staleness=1.0) for v in range(1, 11)],
    "async": [step(v, 3.125, generate=2.0, learn=3.0, staleness=2.0) for v in range(1, 11)],
}


RUNS = {name: [rows, rows] for name, rows in ROWS.items()}
LEAST_S = 20.0


def report(
    runs: Mapping[str, Any] = RUNS, reward: float | None = None, least_s: float = LEAST_S
) -> dict[str, Any]:
    return summarise(runs, modes(Config()), reward=reward, least_s=least_s)


def test_rates_shares_and_bounds() -> None:
    figures = report()["figures"]
    assert figures["rollouts_per_s.sync_split"] == pytest.approx(2.0)
    assert figures["rollouts_per_s.async"] == pytest.approx(3.2)
    assert figures["bound_rollouts_per_s.sync_split"] == pytest.approx(10 / 5)
    assert figures["bound_rollouts_per_s.sync_colocated"] == pytest.approx(10 / 4)
    assert figures["bound_rollouts_per_s.async"] == pytest.approx(10 / 3)
    assert figures["busy.generator.async"] == pytest.approx(2 / 3.125)
    assert figures["busy.learner.sync_split"] == pytest.approx(0.6)
    assert figures["async_over_sync_split"] == pytest.approx(1.6)
    assert figures["async_over_sync_colocated"] == pytest.approx(3.2 / 2.5)
    assert figures["staleness_max.async"] == 2.0


def test_time_to_a_reward_is_that_of_its_mean_over_five_versions() -> None:
    """Versions 3 to 7 have a mean of 0.5, after 7 steps; 1.0 is never reached."""
    figures = report(reward=0.5)["figures"]
    assert figures["s_to_reward.sync_split"] == pytest.approx(35.0)
    assert report(reward=1.0)["figures"]["s_to_reward.async"] is None
    reached_by_all = report()["figures"]
    assert reached_by_all["reward_target"] == pytest.approx(0.8)


def test_every_mode_is_a_valid_config() -> None:
    demo = Path(__file__).parents[3] / "configs" / "recipes" / "demo.yaml"
    for mode in modes(load_config(demo)):
        assert load_config(demo, mode.overrides).queue.max_staleness in (0, 1, 2)


def test_colocated_pools_share_all_devices() -> None:
    config = Config(
        generator=GeneratorConfig(devices="0,1"),
        learner=LearnerConfig(devices="1,2,3"),
        queue=QueueConfig(max_staleness=5),
    )
    split, colocated, _, free = modes(config)
    assert "generator.devices='0,1,2,3'" in colocated.overrides
    assert "learner.processes=4" in colocated.overrides
    assert "queue.max_staleness=5" in free.overrides
    assert "queue.max_staleness=0" in split.overrides


@pytest.mark.parametrize(
    ("tensor", "parallel", "engines", "ranks"), [(1, 1, 5, 5), (2, 1, 2, 5), (2, 2, 2, 4)]
)
def test_colocated_pools_fit_the_devices(tensor: int, parallel: int, engines: int, ranks: int) -> None:
    """vLLM of `tensor` GPUs and a learner of `parallel` ranks a copy, on five GPUs."""
    given = [
        "model.path=somewhere",
        "generator.engine=vllm",
        f"generator.vllm.tensor_parallel={tensor}",
        "generator.devices='0,1,2'",
        "learner.devices='3,4'",
        "learner.processes=2",
        f"learner.parallel.tensor={parallel}",
    ]
    demo = Path(__file__).parents[3] / "configs" / "recipes" / "demo.yaml"
    colocated = modes(load_config(demo, given))[1]
    config = load_config(demo, [*given, *colocated.overrides])
    assert (config.generator.count, config.learner.processes) == (engines, ranks)
    assert config.placement.colocate


def test_colocated_pools_that_cannot_take_turns_have_half_of_the_memory_each() -> None:
    gpus = ["generator.devices='0'", "learner.devices='1'", "learner.backend=megatron"]
    given = ["model.path=somewhere", "generator.engine=vllm", *gpus]
    demo = Path(__file__).parents[3] / "configs" / "recipes" / "demo.yaml"
    config = load_config(demo, [*given, *modes(load_config(demo, given))[1].overrides])
    assert not config.placement.colocate
    assert config.generator.vllm.gpu_memory_share + config.learner.gpu_memory_share <= 0.95


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(report(), tmp_path / "modes.svg")
    picture = (tmp_path / "modes.svg").read_text()
    assert "<svg" in picture


def scaled(rows: list[dict[str, Any]], by: float) -> list[dict[str, Any]]:
    """The same versions on a machine that takes `by` times as long."""
    return [{**row, "perf/step_s": row["perf/step_s"] * by} for row in rows]


def test_repetitions_are_compared_with_each_other_and_not_with_the_machine() -> None:
    """The second repetition runs on a machine that is half as fast: each ratio is that of its own repetition."""
    runs = {name: [rows, scaled(rows, 2.0)] for name, rows in ROWS.items()}
    figures = report(runs)["figures"]
    assert figures["async_over_sync_split"] == pytest.approx(1.6)
    assert figures["async_over_sync_split.low"] == pytest.approx(1.6)
    assert figures["async_over_sync_split.high"] == pytest.approx(1.6)


def test_the_interval_is_students_over_the_logarithms() -> None:
    ratio = Ratio.of([3.0, 5.0, 4.0], [2.0, 2.0, 2.0])
    logs = [log(1.5), log(2.5), log(2.0)]
    centre = sum(logs) / 3
    spread = sqrt(sum((x - centre) ** 2 for x in logs) / 2)
    assert ratio.value == pytest.approx(exp(centre))
    assert ratio.low == pytest.approx(exp(centre - 4.303 * spread / sqrt(3)))
    assert ratio.high == pytest.approx(exp(centre + 4.303 * spread / sqrt(3)))


def test_students_quantiles_match_the_density() -> None:
    """With 1 degree of freedom t is tan, with 2 it has a closed form, too."""
    from math import pi, tan

    assert T_95[0] == pytest.approx(tan(pi * 0.475), abs=5e-4)
    p = 0.975
    assert T_95[1] == pytest.approx((2 * p - 1) / sqrt(2 * p * (1 - p)), abs=5e-4)
    assert list(T_95) == sorted(T_95, reverse=True)


@pytest.mark.parametrize(
    ("ratio", "seconds", "says"),
    [
        (Ratio(1.52, 1.4, 1.65), 30.0, "1.52 x (1.40 to 1.65, 95 %)"),
        (Ratio(0.8, 0.7, 0.9), 30.0, "0.80 x (0.70 to 0.90, 95 %)"),
        (Ratio(1.52, 0.93, 2.5), 30.0, "no claim: 1.52 x, and the interval has 1 in it (0.93 to 2.50, 95 %)"),
        (Ratio(1.52, None, None), 30.0, "no claim: 1.52 x in one repetition"),
        (
            Ratio(1.52, 1.4, 1.65),
            2.0,
            "no claim: the shortest run was measured for 2.0 s and 30 s are needed",
        ),
    ],
)
def test_a_claim_needs_time_and_an_interval(ratio: Ratio, seconds: float, says: str) -> None:
    assert verdict(ratio, Length(versions=4, seconds=seconds, warm_up=3), 30.0).startswith(says)


def test_a_run_that_is_too_short_names_the_versions_it_takes() -> None:
    """The fastest mode has 7 versions of 3.125 s behind its warm-up of 3: 60 s are 19.2 of them."""
    claims = report(least_s=60.0)["claims"]
    assert claims.keys() == {"async_over_sync_split", "async_over_sync_colocated"}
    assert all("--versions 23" in sentence for sentence in claims.values())


def test_every_repetition_has_every_mode_and_the_order_alternates() -> None:
    order = [(repetition, mode.name) for repetition, mode in schedule(modes(Config()), 2)]
    names = [mode.name for mode in modes(Config())]
    assert order == [(0, name) for name in names] + [(1, name) for name in reversed(names)]


def test_the_table_fits_a_narrow_terminal_with_every_header() -> None:
    out = io.StringIO()
    print_report(report(), Console(file=out, width=80))
    printed = out.getvalue()
    for heading in (*ROWS, "rollouts/s", "generator busy", "learner busy", "staleness", "s to reward"):
        assert heading in printed
    assert "…" not in printed
    assert "async over sync_split: 1.60 x (1.60 to 1.60, 95 %)" in printed


def test_the_gpus_of_a_pool_are_shown_where_their_driver_measured_them() -> None:
    """Over the time of the versions that have figures."""
    rows = [row | {"perf/learner/gpu_busy": 0.9, "perf/learner/gpu_watts": 640.0} for row in ROWS["async"]]
    rows[-1] |= {"perf/step_s": 6.25, "perf/learner/gpu_busy": 0.3, "perf/learner/gpu_watts": 100.0}
    found = report({**RUNS, "async": [rows, rows]})
    assert found["figures"]["gpu_busy.learner.async"] == pytest.approx((6 * 0.9 + 2 * 0.3) / 8)
    assert found["figures"]["gpu_busy.generator.async"] is None
    out = io.StringIO()
    print_report(found, Console(file=out, width=80))
    assert "75% 505 W" in out.getvalue()


def test_keys_may_stand_before_and_after_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    demo = str(Path(__file__).parents[3] / "configs" / "recipes" / "demo.yaml")
    ran: list[tuple[int, int, int]] = []

    def train(config: Config) -> None:
        ran.append((config.batch.groups, config.run.seed, config.run.versions))
        path = tmp_path / config.run.name / "metrics.jsonl"
        path.parent.mkdir(parents=True)
        mode = config.run.name.removeprefix("demo-")
        JsonlSink(path).write(ROWS[mode][0])

    monkeypatch.setattr("asyncrl.bench.utilization.train", train)
    words = [
        demo,
        "batch.groups=4",
        "--versions",
        "5",
        "--repetitions",
        "1",
        "--dir",
        str(tmp_path),
        "run.seed=7",
    ]
    assert main(words) == 0
    assert ran == [(4, 7, 5)] * 4
