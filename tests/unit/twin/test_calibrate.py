"""Stage times read back from a folder whose run took known times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.run_plan import write_times
from asyncrl.twin.calibrate import calibrate, longest
from asyncrl.twin.times import GenerationTimes, Lengths, StageTimes, read_times

SIZE, TOKENS, PROMPT = 4, 10, 6
STEP_S, SEQUENCE_S, REWARD_S = 0.02, 0.001, 0.05
TOKEN_S, CLAIM_S, OPTIMIZER_S, PUBLISH_S, QUEUE_S = 1e-4, 0.03, 0.2, 0.04, 0.005
CONFIG = """\
model: {path: m}
tasks: {source: a:b}
reward: {function: a:b}
batch: {groups: 4, group_size: 4}
generator: {slots: 64}
"""


def write_run(
    folder: Path,
    versions: int = 12,
    lengths: tuple[float, float] = (TOKENS, TOKENS),
    groups_s: float = 0.5,
    **last: float,
) -> Path:
    """A version decodes one group, then three at once; every other version has two claims.

    groups_s: waited for groups, a tenth more in each version · last: metrics of the last row besides
    """
    generator: list[dict[str, Any]] = [{"t": 0.0, "process": "generator-0", "role": "generator"}]
    learner: list[dict[str, Any]] = [{"t": 0.0, "process": "learner", "role": "learner"}]
    rows, now, made = [], 100.0, 0
    for version in range(versions):
        begun, computed = now, 0.0
        for groups in (1, 3):
            took = TOKENS * (STEP_S + SEQUENCE_S * groups * SIZE)
            now, computed = now + took, computed + took
            for _ in range(groups):
                generator.append({"t": now, "took": took, "lane": "rollouts", "do": "generate"})
                generator.append({"t": now + REWARD_S, "took": REWARD_S, "lane": "rewards", "do": "score"})
        for name, took in (("fetch", 0.3), ("verify", 0.1), ("flip", 0.02)):
            generator.append({"t": now, "took": took, "lane": "weights", "do": name})
        claims, tokens = 1 + version % 2, SIZE * 4 * (TOKENS + PROMPT)
        learner += [{"t": now, "event": "claim", "version": version}] * claims
        made += SIZE * 4 * TOKENS
        rows.append(
            {
                "version": version + 1, "time": now, "perf/step_s": now - begun,
                "train/rollouts": SIZE * 4, "train/tokens": SIZE * 4 * TOKENS, "train/tokens_with_prompts": tokens,
                "rollout/length/min": lengths[0], "rollout/length/max": lengths[1],
                "rollout/generators": 1, "rollout/tokens_generated": made,
                "perf/generator/time/compute": computed,
                "perf/time/compute/forward_backward": TOKEN_S * tokens + CLAIM_S * claims,
                "perf/time/compute/optimizer": OPTIMIZER_S, "perf/time/wait/publish": PUBLISH_S,
                "perf/time/wait/queue": QUEUE_S, "perf/time/wait/groups": groups_s * (1 + version / 10),
            }
        )  # fmt: skip
    rows[-1] |= last
    (folder / "trace").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    for name, lines in (("metrics", rows), ("trace/generator-0", generator), ("trace/learner", learner)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_times_of_a_run_are_read_back(tmp_path: Path) -> None:
    times = calibrate(write_run(tmp_path / "run"))
    assert times.generation.step_s == pytest.approx(STEP_S, rel=1e-3)
    assert times.generation.sequence_s == pytest.approx(SEQUENCE_S, rel=1e-3)
    assert times.generation.reward_s == pytest.approx(REWARD_S)
    learner = times.learner
    assert (learner.token_s, learner.claim_s) == pytest.approx((TOKEN_S, CLAIM_S))
    assert (learner.version_s, learner.publish_s) == pytest.approx((OPTIMIZER_S, PUBLISH_S))
    assert (times.sync.fetch_s, times.sync.flip_s, times.sync.queue_s) == pytest.approx((0.4, 0.02, QUEUE_S))
    assert learner.report_s == pytest.approx(QUEUE_S)
    assert times.lengths.mean() == pytest.approx(TOKENS)
    assert times.lengths.prompt == pytest.approx(PROMPT)


@pytest.mark.parametrize(
    ("groups_s", "claim_s"),
    # Of versions 3 to 11, the one that waited least but for a tenth of them; or five reports.
    [(0.01, 0.01 * 1.38), (0.5, 5 * QUEUE_S)],
    ids=["groups were ready", "generators were late"],
)
def test_a_claim_takes_as_long_as_where_groups_were_ready(
    tmp_path: Path, groups_s: float, claim_s: float
) -> None:
    times = calibrate(write_run(tmp_path / "run", groups_s=groups_s))
    assert times.sync.queue_s + times.learner.first_claim_s == pytest.approx(claim_s)


def test_a_request_takes_as_long_as_a_report_although_the_learner_waits_for_the_rest_alone(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "run")
    rows = [json.loads(line) | {"queue/report_ms": 8.0} for line in (run / "metrics.jsonl").open()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    times = calibrate(run)
    assert (times.sync.queue_s, times.learner.report_s) == pytest.approx((0.008, QUEUE_S))


def test_decode_steps_that_the_engine_has_timed_come_before_those_of_whole_groups(tmp_path: Path) -> None:
    """By whole groups it is 20 ms and 1 ms; 30 ms and 0.25 ms give the same tokens in the same seconds, about."""
    timed = {"perf/generator/decode/step_s": 0.03, "perf/generator/decode/sequence_s": 0.00025}
    times = calibrate(write_run(tmp_path / "run", **timed)).generation
    assert times.step_s / times.sequence_s == pytest.approx(0.03 / 0.00025)
    assert times.step_s == pytest.approx(0.025, rel=0.2)


def test_prefills_that_the_engine_has_timed_are_not_in_its_decode_steps(tmp_path: Path) -> None:
    """Half of the time is theirs: decoding was twice as fast, and makes nine of ten tokens. The engines' threads had
    half of the time in which they worked, so that prefills took twice as long."""
    seconds = sum(TOKENS * (STEP_S + SEQUENCE_S * groups * SIZE) for groups in (1, 3)) * 12 / 4
    timed = {
        "perf/generator/decode/step_s": STEP_S,
        "perf/generator/decode/sequence_s": SEQUENCE_S,
        "perf/generator/prefill/step_s": 0.04,
        "perf/generator/prefill/sequence_s": 0.003,
        "perf/generator/decode/seconds": seconds,
        "perf/generator/prefill/seconds": seconds,
    }
    times = calibrate(write_run(tmp_path / "run", **timed)).generation
    height = 0.5 / 0.9
    assert times.step_s == pytest.approx(STEP_S * height, rel=1e-3)
    assert times.sequence_s == pytest.approx(SEQUENCE_S * height, rel=1e-3)
    assert (times.prefill_s, times.prefill_sequence_s) == pytest.approx((2 * 0.04, 2 * 0.003), rel=1e-3)


def test_lengths_without_logged_rollouts_keep_their_mean_and_ends(tmp_path: Path) -> None:
    lengths = calibrate(write_run(tmp_path / "run", lengths=(4.0, 12.0))).lengths
    assert lengths.mean() == pytest.approx(TOKENS)
    assert (lengths.quantiles[0], lengths.quantiles[-1]) == pytest.approx((4.0, 12.0), rel=0.02)


def test_a_run_that_says_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too few versions"):
        calibrate(write_run(tmp_path / "short", versions=5))
    silent = write_run(tmp_path / "silent")
    (silent / "trace" / "generator-0.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"telemetry\.trace_mb"):
        calibrate(silent)


def test_the_longest_of_a_group() -> None:
    uniform = Lengths(quantiles=np.linspace(1, 101, 101).tolist())
    assert longest(uniform, 1) == pytest.approx(51, rel=1e-3)
    assert longest(uniform, 3) == pytest.approx(76, rel=1e-3)


def test_a_file_of_times_is_read_as_it_was_written(tmp_path: Path) -> None:
    times = StageTimes(
        GenerationTimes(step_s=0.012345),
        Lengths(quantiles=[1.0, 2.5, 8.0]),
        generator_devices=8,
        rank_devices=2,
    )
    write_times(times, tmp_path / "times.yaml", "mine")
    assert read_times(tmp_path / "times.yaml") == times
    assert (tmp_path / "times.yaml").read_text().startswith("# mine\n")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("generatoin: {}", r"times\.generatoin = {}: no such key"),
        ("generation: {step: 1}", r"did you mean times\.generation\.step_s"),
        ("generation: {step_s: -1}", r"times\.generation\.step_s = -1"),
        ("generation: {step_s: 0, sequence_s: 0}", "a decode step takes time"),
        ("lengths: {quantiles: [3, 2]}", "must rise"),
        ("rank_devices: 0", r"times\.rank_devices = 0"),
        ("generator_devices: many", r"times\.generator_devices"),
    ],
)
def test_a_file_that_is_wrong_names_key_rule_and_remedy(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "times.yaml").write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_times(tmp_path / "times.yaml")


def test_lengths_by_median_and_sigma() -> None:
    lengths = Lengths(median=1000.0, sigma=0.5, most=1e6)
    assert lengths.mean() == pytest.approx(1000 * np.exp(0.125), rel=0.01)
    assert Lengths(median=1000.0, sigma=0.5, most=900.0).table().max() == 900.0
    assert Lengths(median=70.0).mean() == 70.0
