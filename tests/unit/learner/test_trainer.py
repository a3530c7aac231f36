"""The trainer's loop against an in-memory queue and publisher, on a real (tiny) model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from learner_cases import packed, random_group, small_config
from trainer_cases import Case, FakeQueue, newest

from asyncrl.config.config_consistency import AGREED
from asyncrl.config.schema import CheckpointConfig, Config, LearnerConfig, RewardConfig, RunConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.config.sections.tasks import EvaluationConfig
from asyncrl.device.turns import DeviceTurn
from asyncrl.errors import DeadlineError, RefusedError, StoppedError, TrainingError
from asyncrl.learner import checkpoint
from asyncrl.learner.checks.group_check import GroupCheck
from asyncrl.learner.reporting import report
from asyncrl.learner.reporting.utilization import even_tokens
from asyncrl.learner.train_stream import StepRestarted, TrainStream
from asyncrl.learner.trainer import MAX_REFUSED
from asyncrl.queue.protocol.settings import Frontier
from asyncrl.queue.wire import wire
from asyncrl.telemetry.sinks import read_rows
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Group


def test_a_run_from_the_first_to_the_last_version(tmp_path: Path) -> None:
    case = Case(small_config(tmp_path), FakeQueue(accuracy={0: 0.25, 2: 0.5, 3: 0.75}))
    case.trainer.run()
    queue, publisher = case.queue, case.publisher
    assert queue.of("open") == [("eval", None), ("train", None)]
    assert queue.of("post") == [AGREED, "weights/0"]
    assert queue.even_tokens == even_tokens(small_config(tmp_path).model) < math.inf
    assert queue.of("trained") == [0, 1, 2]
    assert queue.of("finish") == ["done"]
    assert sorted(publisher.published) == [0, 1, 2, 3]
    assert publisher.closed
    assert not torch.equal(publisher.published[0], publisher.published[1])

    steps = [row for row in case.rows if "perf/step_s" in row]
    assert [row["version"] for row in steps] == [1, 2, 3]
    assert all(
        row["train/groups"] == 2 and row["train/rollouts"] == 8 and row["queue/ready"] == 5 for row in steps
    )
    # Version k trains groups whose tokens are all of version 0.
    assert [row["train/staleness/max"] for row in steps] == [0, 1, 2]
    assert [row["perf/busy/generator"] for row in steps] == [0.75] * 3
    assert [row["perf/generator/tokens_per_s"] for row in steps] == [25.0] * 3
    assert [(row["sync/publish_ms"], row["sync/publish_floor_ms"], row["sync/lag"]) for row in steps] == [
        (3.0, 1.0, 1)
    ] * 3
    medians = ("sync/pause_ms_p50", "sync/pause_floor_ms", "sync/fetch_ms_p50")
    assert [[row[name] for name in medians] for row in steps] == [[2.0, 1.5, 30.0]] * 3
    accuracy = {row["version"]: row["eval/accuracy"] for row in case.rows if "eval/accuracy" in row}
    assert accuracy == {0: 0.25, 2: 0.5, 3: 0.75}

    summary = case.summary
    assert summary["ended"] == "done"
    assert (summary["heldout_accuracy_start"], summary["heldout_accuracy_end"]) == (0.25, 0.75)
    assert (summary["versions"], summary["groups_trained"], summary["rollouts_trained"]) == (3, 6, 24)
    assert (summary["tokens_generated"], summary["weight_updates"]) == (300, 2)
    assert summary["tasks_dropped"] == 42  # as the queue has it at the end; the last row says 1
    assert summary["tasks_dropped_by_reason"] == {"reward": 2, "filtered": 40}
    assert summary["staleness"] == {"mean": 1.0, "max": 2, "bound": 1}
    assert summary["utilization"]["generator"] == pytest.approx(0.75)
    assert newest(case.folder) == case.folder / "checkpoints" / "v000003"
    assert (case.folder / "final" / "config.json").exists()


def test_sets_with_names_have_metrics_of_their_own(tmp_path: Path) -> None:
    entry = {"source": "x.jsonl"}
    config = small_config(tmp_path, evaluation=EvaluationConfig(sets={"math": entry, "code": entry}, every=3))
    case = Case(config, FakeQueue(accuracy={0: 0.25, 3: 0.75}), {"math": 2, "code": 3})
    case.trainer.run()
    evaluated = [row for row in case.rows if "perf/step_s" not in row]
    assert [(row["version"], row["eval/math/accuracy"], row["eval/code/accuracy"]) for row in evaluated] == [
        (0, 0.25, 0.25),
        (3, 0.75, 0.75),
    ]
    assert case.summary["heldout_accuracy_end"] is None
    assert case.summary["heldout"] == {
        "math/accuracy": 0.75,
        "math/unscored": 0.0,
        "code/accuracy": 0.75,
        "code/unscored": 0.0,
    }


def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path: Path) -> None:
    def config(folder: str, versions: int, resume: bool = False) -> Config:
        run = RunConfig(name=folder, dir=str(tmp_path), versions=versions, resume=resume)
        return small_config(tmp_path, run=run, checkpoint=CheckpointConfig(every=1))

    through = Case(config("through", 4), FakeQueue())
    through.trainer.run()
    Case(config("halves", 2), FakeQueue()).trainer.run()
    second = Case(config("halves", 4, resume=True), FakeQueue())
    second.trainer.run()
    assert second.queue.of("open") == [("eval", b"eval after 0"), ("train", b"train after 2")]
    assert second.queue.of("trained") == [2, 3]
    assert second.queue.of("checkpointed") == [("train", 3), ("train", 4)]
    assert sorted(second.publisher.published) == [2, 3, 4]
    assert torch.equal(second.publisher.published[4], through.publisher.published[4])
    assert [row["version"] for row in second.rows if "perf/step_s" in row] == [1, 2, 3, 4]
    assert second.summary["groups_trained"] == 8
    kept = sorted(path.name for path in (second.folder / "checkpoints").iterdir())
    assert kept == ["v000003", "v000004"]


def test_rows_with_names_of_an_earlier_asyncrl_are_kept(tmp_path: Path) -> None:
    """Such as a run has that began under it; the summary is of the others."""

    def config(versions: int, resume: bool) -> Config:
        run = RunConfig(name="it", dir=str(tmp_path), versions=versions, resume=resume)
        return small_config(tmp_path, run=run, checkpoint=CheckpointConfig(every=1))

    Case(config(1, resume=False), FakeQueue()).trainer.run()
    before = [
        {"time": 1.0, "version": 0, "heldout/accuracy": 0.25},
        {"time": 2.0, "version": 1, "step_s": 1.0, "groups": 2, "reward/mean": 0.5, "weight_updates": 1},
    ]
    rows = tmp_path / "it" / report.ROWS
    rows.write_text("".join(json.dumps(row) + "\n" for row in before), encoding="utf-8")
    case = Case(config(2, resume=True), FakeQueue())
    case.trainer.run()
    assert case.rows[:2] == before
    assert [row["version"] for row in case.rows if "perf/step_s" in row] == [2]
    assert (case.summary["versions"], case.summary["groups_trained"]) == (2, 2)


def test_a_learner_that_died_before_its_first_checkpoint_begins_at_the_beginning(tmp_path: Path) -> None:
    """Its streams are in use, by the one that died: they are taken back."""
    config = small_config(tmp_path, run=RunConfig(name="it", dir=str(tmp_path), versions=2, resume=True))
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / report.ROWS).write_text(
        '{"version": 1, "perf/step_s": 1, "old": true}\n', encoding="utf-8"
    )
    case = Case(config, FakeQueue())
    case.trainer.run()
    snapshots = [Frontier.from_wire(wire.unpack(snapshot)) for _, snapshot in case.queue.of("open")]
    assert snapshots == [Frontier(), Frontier()]
    assert [row["version"] for row in case.rows if "perf/step_s" in row] == [1, 2]
    assert not any("old" in row for row in case.rows)


def with_cost(ordinal: int) -> Group:
    group = random_group(ordinal)
    costs = np.linspace(0, 1 + ordinal, len(group.rewards), dtype=np.float32)
    return dataclasses.replace(group, reward_parts={"cost": costs})


def test_critics_and_adapted_coefficients_are_resumed_too(tmp_path: Path) -> None:
    def config(folder: str, versions: int, resume: bool = False) -> Config:
        run = RunConfig(name=folder, dir=str(tmp_path), versions=versions, resume=resume)
        algorithm = AlgorithmConfig(advantage="safe_rlhf", cost_lr=0.05)
        return small_config(tmp_path, run=run, algorithm=algorithm, reward=RewardConfig(weights={"cost": 0}))

    through = Case(config("through", 4), FakeQueue(make=with_cost))
    through.trainer.run()
    Case(config("halves", 2), FakeQueue(make=with_cost)).trainer.run()
    second = Case(config("halves", 4, resume=True), FakeQueue(make=with_cost))
    second.trainer.run()
    assert torch.equal(second.publisher.published[4], through.publisher.published[4])
    multipliers = [row["train/cost_multiplier"] for row in second.rows if "perf/step_s" in row]
    assert multipliers == [row["train/cost_multiplier"] for row in through.rows if "perf/step_s" in row]
    assert multipliers[0] == 1.0 < multipliers[1] < multipliers[2]
    whole = newest(second.folder)
    assert whole is not None
    assert checkpoint.read_meta(whole).controls["cost_multiplier"] > multipliers[3]


def test_a_checkpoint_from_before_there_were_controls_is_read(tmp_path: Path) -> None:
    old = {"version": 3, "train": b"t", "eval": None, "format": 1}
    (tmp_path / checkpoint.META).write_bytes(msgpack.packb(old))
    assert checkpoint.read_meta(tmp_path) == checkpoint.Meta(3, b"t", None, {}, format=1)


def test_several_optimizer_steps_make_one_version(tmp_path: Path) -> None:
    learner = LearnerConfig(micro_batch_tokens=64, mini_batches=2, optimizer=OptimizerConfig(lr=1e-2))
    algorithm = AlgorithmConfig(advantage="gae", proximal="frozen")
    case = Case(small_config(tmp_path, learner=learner, algorithm=algorithm), FakeQueue())
    case.trainer.run()
    steps = [row for row in case.rows if "perf/step_s" in row]
    assert sorted(case.publisher.published) == [0, 1, 2, 3]
    assert case.queue.of("trained") == [0, 1, 2]
    assert [row["train/optimizer_steps"] for row in steps] == [2, 2, 2]
    assert all(row["train/critic/loss"] > 0 and row["train/groups"] == 2 for row in steps)
    assert steps[0]["train/critic/explained_variance"] == pytest.approx(
        0, abs=1e-6
    )  # a critic starts with 0 everywhere


def test_the_target_accuracy_ends_the_run(tmp_path: Path) -> None:
    run = RunConfig(name="case", dir=str(tmp_path), versions=50, target_accuracy=0.9)
    case = Case(small_config(tmp_path, run=run), FakeQueue(accuracy={2: 0.95}))
    case.trainer.run()
    assert case.trainer.version == 2
    assert case.queue.of("finish") == ["target"]
    assert (case.folder / "final" / "config.json").exists()


def test_a_stop_while_groups_are_missing_gives_the_step_up(tmp_path: Path) -> None:
    queue = FakeQueue(dry_from=3)  # the second group of step 1 never comes
    case = Case(small_config(tmp_path), queue)
    queue.on_claim = lambda step, index: case.stop.set() if (step, index) == (1, 1) else None
    with pytest.raises(StoppedError, match="stopped at version 1, which is saved"):
        case.trainer.run()
    assert queue.of("trained") == [0]
    assert queue.of("finish") == ["stopped"]
    whole = newest(case.folder)
    assert whole is not None
    assert checkpoint.read_meta(whole) == checkpoint.Meta(1, b"train after 1", b"eval after 0")
    assert (case.summary["versions"], case.summary["ended"]) == (1, "stopped")


@pytest.mark.parametrize("other", ["stopped", "target"])
def test_the_reason_of_another_rank_to_leave_counts_here_too(tmp_path: Path, other: str) -> None:
    """That rank alone has had the signal, or has seen the evaluation."""
    queue = FakeQueue()
    case = Case(small_config(tmp_path), queue)
    alone = case.backend.exchange

    def with_another(mine: Any) -> list[Any]:
        if not isinstance(mine, list) or not isinstance(mine[0], str):
            return alone(mine)
        return [mine, [other if queue.of("trained") else "", mine[1]]]

    case.backend.exchange = with_another  # type: ignore[method-assign]
    with pytest.raises(StoppedError) if other == "stopped" else contextlib.nullcontext():
        case.trainer.run()
    assert queue.of("trained") == [0]
    assert queue.of("finish") == [other]


def test_a_step_that_the_queue_takes_apart_begins_anew(tmp_path: Path) -> None:
    """What it had accumulated counts for nothing: the weights are those of a run that was not disturbed."""

    def config(name: str) -> Config:
        return small_config(tmp_path, run=RunConfig(name=name, dir=str(tmp_path), versions=3))

    calm = Case(config("calm"), FakeQueue())
    calm.trainer.run()
    claims: list[tuple[int, int]] = []

    def disturb(step: int, index: int) -> None:
        claims.append((step, index))
        if claims.count((1, 1)) == 1 and (step, index) == (1, 1):
            raise RefusedError("abandoned", "groups of step 1 are lost")

    disturbed = Case(config("disturbed"), FakeQueue(on_claim=disturb))
    disturbed.trainer.run()
    assert claims == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert disturbed.queue.of("trained") == [0, 1, 2]
    assert torch.equal(disturbed.publisher.published[3], calm.publisher.published[3])


@pytest.mark.parametrize(
    "other",
    [[None, False, False, "abandoned", False, []], [1, False, False, "", False, []]],
    ids=["refused", "another attempt"],
)
def test_all_ranks_begin_a_step_anew_together(other: list[Any]) -> None:
    """This rank has its claim, of attempt 0."""

    class TwoRanks:
        rank = data_rank = 0

        def exchange(self, mine: Any) -> list[Any]:
            assert mine == [0, False, False, "", False, []]
            return [mine, other]

    backend: Any = TwoRanks()
    stream = TrainStream(
        FakeQueue(),
        backend,
        Config(),
        Spans(),
        check=GroupCheck(rollouts=4, longest=32, vocabulary=33),
        prepare=packed,
        learner_epoch=1,
        stop=threading.Event(),
        idle=lambda: None,
        turn=DeviceTurn.always(),
        status=ProcessStatus(),
    )
    with pytest.raises(StepRestarted):
        next(stream.step(0))
    stream.close()


def test_no_groups_for_too_long_is_named(tmp_path: Path) -> None:
    learner = LearnerConfig(micro_batch_tokens=64, groups_deadline_s=1e-6)
    case = Case(small_config(tmp_path, learner=learner), FakeQueue(dry_from=0))
    with pytest.raises(
        DeadlineError, match=r"learner rank 0 waited .* for the generators: a group for version 1"
    ) as error:
        case.trainer.run()
    assert "1 leased, 0 ready, 0 trained; dropped: 40 filtered, 2 reward; nearly all" in str(error.value)
    assert case.publisher.closed


def test_what_was_learned_is_saved_when_no_more_groups_come(tmp_path: Path) -> None:
    learner = LearnerConfig(micro_batch_tokens=64, groups_deadline_s=0.2)
    case = Case(small_config(tmp_path, learner=learner), FakeQueue(dry_from=3))
    with pytest.raises(DeadlineError, match="a group for version 2"):
        case.trainer.run()
    whole = newest(case.folder)
    assert whole is not None
    assert checkpoint.read_meta(whole) == checkpoint.Meta(1, b"train after 1", b"eval after 0")


def test_a_stop_before_the_optimizer_steps_of_a_whole_batch_gives_them_up(tmp_path: Path) -> None:
    learner = LearnerConfig(micro_batch_tokens=64, mini_batches=2, optimizer=OptimizerConfig(lr=1e-2))
    queue = FakeQueue()
    case = Case(small_config(tmp_path, learner=learner), queue)
    # Asked for with the last claim of version 1, of which the stream is then done.
    queue.on_claim = lambda step, index: case.stop.set() if (step, index) == (1, 1) else None
    with pytest.raises(StoppedError, match="stopped at version 1, which is saved"):
        case.trainer.run()
    assert queue.of("trained") == [0]
    assert queue.of("finish") == ["stopped"]
    assert sorted(case.publisher.published) == [0, 1]


def poisoned(ordinal: int, bad: Sequence[int]) -> Group:
    """These groups have a recorded log-prob that is not a number."""
    group = random_group(ordinal)
    if ordinal in bad:
        group.logprobs[group.loss_mask != 0] = np.nan
    return group


def test_a_bad_step_stops_the_run(tmp_path: Path) -> None:
    case = Case(small_config(tmp_path), FakeQueue())
    case.backend.policy.gradient_norm = lambda scale: math.nan  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="version 0 has gradient norm nan"):
        case.trainer.run()
    assert sorted(case.publisher.published) == [0]


@pytest.mark.parametrize(("bad", "survives"), [(2, True), (100, False)])
def test_bad_steps_may_be_skipped_but_not_for_ever(tmp_path: Path, bad: int, survives: bool) -> None:
    learner = LearnerConfig(micro_batch_tokens=64, on_bad_step="skip", optimizer=OptimizerConfig(lr=1e-2))
    case = Case(small_config(tmp_path, learner=learner), FakeQueue())
    norms, norm = [math.nan] * bad, case.backend.policy.gradient_norm
    case.backend.policy.gradient_norm = lambda scale: norms.pop() if norms else norm(scale)  # type: ignore[method-assign]
    if survives:
        case.trainer.run()
        assert case.queue.of("reject") == [(0, "not_finite")] * 2
        assert case.queue.of("trained") == [0, 1, 2]
        assert math.isfinite(float(case.publisher.published[3].sum()))
    else:
        with pytest.raises(TrainingError, match="in a row"):
            case.trainer.run()


def test_a_bad_group_stops_the_run_by_name(tmp_path: Path) -> None:
    case = Case(small_config(tmp_path), FakeQueue(make=lambda o: poisoned(o, [1])))
    with pytest.raises(
        TrainingError, match="for version 0 1 groups have values that are not finite: of tasks 1"
    ):
        case.trainer.run()
    assert sorted(case.publisher.published) == [0]
    assert case.queue.of("abandon") == []


def test_a_group_with_a_fault_is_dropped_by_name_and_leaves_no_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also under `on_bad_batch: stop`: such a group says nothing about the model."""

    def config(name: str) -> Config:
        return small_config(tmp_path, run=RunConfig(name=name, dir=str(tmp_path), versions=3))

    refusing = Case(
        config("refusing"), FakeQueue(make=lambda o: random_group(o, size=3 if o in (1, 2) else 4))
    )
    refusing.trainer.run()
    assert refusing.queue.of("abandon") == [(0, [1], "corrupt"), (0, [2], "corrupt")]
    assert refusing.queue.of("trained") == [0, 1, 2]
    without = Case(config("without"), FakeQueue(dropped=[1, 2]))
    without.trainer.run()
    assert torch.equal(refusing.publisher.published[3], without.publisher.published[3])
    said = [record.getMessage() for record in caplog.records if "is dropped as" in record.getMessage()]
    assert said[0] == (
        "the group of task 1 is dropped as corrupt: it has 3 rollouts, and batch.group_size=4 (made by worker g0)"
    )


def test_generators_that_make_such_groups_alone_end_the_run(tmp_path: Path) -> None:
    case = Case(small_config(tmp_path), FakeQueue(make=lambda o: random_group(o, version=9)))
    with pytest.raises(
        TrainingError, match=r"task \d+: a token has the version 9, the newest is 0 .* with another model"
    ):
        case.trainer.run()
    assert len(case.queue.of("abandon")) == MAX_REFUSED
    assert case.queue.of("trained") == []


def test_versions_of_a_learner_that_died_are_known(tmp_path: Path) -> None:
    """The queue still has groups that they made."""
    config = small_config(tmp_path, run=RunConfig(name="it", dir=str(tmp_path), versions=2, resume=True))
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / report.ROWS).write_text('{"version": 4, "perf/step_s": 1}\n', encoding="utf-8")
    case = Case(config, FakeQueue(make=lambda o: random_group(o, version=6 if o == 1 else 5)))
    case.trainer.run()
    assert case.queue.of("abandon") == [(0, [1], "corrupt")]


def test_any_number_of_groups_that_came_with_a_bad_value_may_be_skipped(tmp_path: Path) -> None:
    """The model is not at fault, as it may be where its own outputs are bad."""
    learner = LearnerConfig(micro_batch_tokens=64, on_bad_batch="skip", optimizer=OptimizerConfig(lr=1e-2))
    case = Case(small_config(tmp_path, learner=learner), FakeQueue(make=lambda o: poisoned(o, range(9))))
    case.trainer.run()
    assert case.queue.of("abandon") == [(0, [o], "not_finite") for o in range(9)]
    assert case.queue.of("trained") == [0, 1, 2]
    assert [row["train/groups_not_finite"] for row in case.rows if "train/groups_not_finite" in row] == [
        9,
        0,
        0,
    ]


@pytest.mark.parametrize("mini_batches", [1, 2], ids=["streaming", "whole batch"])
def test_a_bad_group_leaves_no_trace(tmp_path: Path, mini_batches: int) -> None:
    """The weights are, bit for bit, those of a run whose stream never had it."""
    frozen = AlgorithmConfig(proximal="frozen" if mini_batches > 1 else "behaviour")

    def config(name: str) -> Config:
        learner = LearnerConfig(
            micro_batch_tokens=64,
            mini_batches=mini_batches,
            on_bad_batch="skip",
            optimizer=OptimizerConfig(lr=1e-2),
        )
        run = RunConfig(name=name, dir=str(tmp_path), versions=3)
        return small_config(tmp_path, run=run, learner=learner, algorithm=frozen)

    bad = [1, 2, 5]
    skipping = Case(config("skipping"), FakeQueue(make=lambda o: poisoned(o, bad)))
    skipping.trainer.run()
    without = Case(config("without"), FakeQueue(dropped=bad))
    without.trainer.run()
    assert skipping.queue.of("abandon") == [
        (0, [1], "not_finite"),
        (0, [2], "not_finite"),
        (1, [5], "not_finite"),
    ]
    assert skipping.queue.of("trained") == [0, 1, 2]
    for version in range(4):
        assert torch.equal(skipping.publisher.published[version], without.publisher.published[version])
    assert [row["train/groups_not_finite"] for row in skipping.rows if "train/groups_not_finite" in row] == [
        2,
        1,
        0,
    ]


def test_groups_that_are_all_bad_are_the_models_fault(tmp_path: Path) -> None:
    learner = LearnerConfig(micro_batch_tokens=64, on_bad_batch="skip", optimizer=OptimizerConfig(lr=1e-2))
    case = Case(small_config(tmp_path, learner=learner), FakeQueue())
    with torch.no_grad():
        next(iter(case.backend.local_tensors().values())).fill_(math.nan)
    with pytest.raises(TrainingError, match=r"finding number 3 for it"):
        case.trainer.run()
    assert sorted(case.publisher.published) == [0]


def versions_with_a_row(folder: Path) -> list[int]:
    rows = read_rows(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else ()
    return [row["version"] for row in rows if "perf/step_s" in row]


def test_a_version_begins_before_the_report_of_the_last_one_is_answered_and_its_row_is_written(
    tmp_path: Path,
) -> None:
    begun, before = threading.Event(), list[float]()

    class Slow(FakeQueue):
        def trained(self, stream: str, *, step: int, **about: Any) -> Any:
            assert step != 0 or begun.wait(20.0), "version 2 waited for the answer"
            return super().trained(stream, step=step, **about)

    case = Case(small_config(tmp_path), Slow())
    add = case.trainer.version_step.add

    def noticed(groups: Any, version: int, *about: Any, **more: Any) -> None:
        if version == 1 and not begun.is_set():
            assert versions_with_a_row(case.folder) == []
            before.append(time.time())
            begun.set()
        add(groups, version, *about, **more)

    publish = case.publisher.publish

    def published(version: int) -> Any:
        if version == 1:
            case.trainer.stream._ahead[1].result(20.0)  # type: ignore[index]
        return publish(version)

    case.trainer.version_step.add = noticed  # type: ignore[method-assign]
    case.publisher.publish = published  # type: ignore[method-assign]
    case.trainer.run()
    assert versions_with_a_row(case.folder) == [1, 2, 3]
    (row,) = [row for row in case.rows if row["version"] == 1 and "perf/step_s" in row]
    assert row["time"] <= before[0] + 0.001  # when it was published


def test_a_version_has_its_row_before_it_is_saved(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Watched(FakeQueue):
        def snapshot(self, stream: str, *, learner_epoch: int) -> bytes:
            seen.append(versions_with_a_row(tmp_path / "case"))
            return super().snapshot(stream, learner_epoch=learner_epoch)

    Case(small_config(tmp_path, checkpoint=CheckpointConfig(every=2)), Watched()).trainer.run()
    assert seen[-2:] == [[1, 2], [1, 2, 3]]


def test_a_version_whose_successor_has_no_groups_yet_has_its_row_at_once(tmp_path: Path) -> None:
    case = Case(small_config(tmp_path), FakeQueue(ahead=False))
    take = case.trainer._take_groups
    seen = []

    def noticed() -> list[Group]:
        seen.append(versions_with_a_row(case.folder))
        return take()

    case.trainer._take_groups = noticed  # type: ignore[method-assign]
    case.trainer.run()
    assert seen == [[], [1], [1, 2]]


def test_an_error_leaves_the_row_of_the_last_version(tmp_path: Path) -> None:
    """It comes before the first claim of version 2 is computed, with which the row would be written."""
    case = Case(small_config(tmp_path), FakeQueue())
    add = case.trainer.version_step.add

    def failing(groups: Any, version: int, *about: Any, **more: Any) -> None:
        if version == 1:
            if case.trainer.row is not None:
                case.trainer.row.report.result(20.0)
            raise MemoryError
        add(groups, version, *about, **more)

    case.trainer.version_step.add = failing  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        case.trainer.run()
    assert versions_with_a_row(case.folder) == [1]
