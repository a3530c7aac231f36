"""The behaviour contract: gaps by hand, and what is wrong in an engine is found out before it is trained on."""

from __future__ import annotations

import copy
import dataclasses
import math
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import rollout, small_config, tiny_model
from trainer_cases import FakePublisher, FakeQueue

from asyncrl.config.load import load_config
from asyncrl.config.schema import CheckpointConfig, Config, GeneratorConfig, LearnerConfig, RunConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig, CorrectionConfig
from asyncrl.config.sections.learner import LogprobGateConfig, OptimizerConfig
from asyncrl.config.sections.placement import PlacementConfig
from asyncrl.device.turns import DeviceTurn
from asyncrl.errors import BehaviourMismatchError, ConfigError
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.transformers.kv_cache import ATTENTION
from asyncrl.generator.engines.transformers.slots import SlotBatch
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.checks.logprob_check import LogprobGap, LogprobGate, LogprobProbes
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.startup import open_trainer
from asyncrl.learner.training import requirements
from asyncrl.models.loading import load_causal_lm
from asyncrl.probes import prompts
from asyncrl.queue.protocol.replies import Trained
from asyncrl.telemetry.sinks import read_rows
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Group, Rollout, Sampling, Task

FAST = LearnerConfig(
    micro_batch_tokens=64, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=1), groups_deadline_s=5.0
)


def config_of(tmp_path: Path, gate: LogprobGateConfig | None = None, **generator: Any) -> Config:
    """Of a real engine."""
    learner = dataclasses.replace(FAST, logprob_gate=gate or LogprobGateConfig())
    sizes = {"max_length": 32, "max_tokens": 8, "slots": 8}
    return small_config(tmp_path, learner=learner, generator=GeneratorConfig(**(sizes | generator)))


def group_of(*rollouts: Rollout, ordinal: int = 0) -> Group:
    return Group.from_rollouts(Task(ordinal, ""), Sampling(), rollouts)


# ---- by hand


def test_only_rollouts_that_are_all_of_the_version_are_compared_if_keys_live_through_flips(
    tmp_path: Path,
) -> None:
    gate = LogprobGate(config_of(tmp_path))
    moved = rollout([1, 2, 3, 4], 2, version=5)
    moved = dataclasses.replace(moved, versions=np.array([-1, -1, 4, 5], np.int32))
    batch = MicroBatch.of(
        [
            group_of(rollout([1, 2, 3, 4], 2, version=5), ordinal=7),
            group_of(moved, rollout([1, 2, 3], 2, version=5), ordinal=9),
        ]
    )
    # log μ = -1 of every token. Those of the version: the last two of the first rollout, and the last of the third.
    logp_N = torch.tensor([0, 0, -1.5, -1.0, 0, 0, 9.0, 9.0, 0, 0, -0.25])
    assert gate.gap(batch, logp_N, version=5) == LogprobGap(3, 1.25, 0.75, "task 9")
    assert gate.gap(batch, logp_N, version=4) == LogprobGap()
    assert LogprobGap.of(
        [LogprobGap(3, 1.25, 0.75, "task 9"), LogprobGap(), LogprobGap(1, 2.0, 2.0, "task 1")]
    ) == LogprobGap(4, 3.25, 2.0, "task 1")
    recomputed = LogprobGate(config_of(tmp_path, kv="recompute"))
    assert recomputed.gap(batch, logp_N, version=5) == LogprobGap(4, 11.25, 10.0, "task 9")
    assert recomputed.gap(batch, logp_N, version=4) == LogprobGap(1, 10.0, 10.0, "task 9")
    pools = PlacementConfig(generators={"small": {"kv": "keep"}})
    mixed = LogprobGate(dataclasses.replace(config_of(tmp_path, kv="recompute"), placement=pools))
    assert mixed.gap(batch, logp_N, version=5).count == 3, "no one knows which pool made a rollout"
    gate.abandoned = range(4, 6)
    assert gate.gap(batch, logp_N, version=5) == LogprobGap()


def test_an_engine_with_a_prefix_cache_is_compared_at_the_start_alone(tmp_path: Path) -> None:
    gate = LogprobGate(config_of(tmp_path, own_engine="mine.py:load"))
    for version, tokens in ((0, 1), (1, 0)):
        batch = MicroBatch.of([group_of(rollout([1, 2], 1, version=version))])
        assert gate.gap(batch, torch.zeros(2), version).count == tokens


@pytest.mark.parametrize(
    ("cut", "apart"),
    [
        ({}, [0.5, 0.5, 1.0]),
        ({"top_p": math.exp(-0.6)}, [0.0, 0.5, 0.4]),  # recorded log-probs may be larger by up to 0.6
        ({"top_k": 5}, [0.0, 0.5, 0.0]),
        ({"min_p": 0.1}, [0.0, 0.5, 0.0]),
    ],
)
def test_a_cut_support_may_raise_recorded_log_probs_and_never_lower_them(
    tmp_path: Path, cut: dict[str, Any], apart: list[float]
) -> None:
    config = small_config(
        tmp_path,
        generator=GeneratorConfig(max_length=32, max_tokens=8, **cut),
        algorithm=AlgorithmConfig(truncated="weigh"),
    )
    batch = MicroBatch.of([group_of(rollout([1, 2, 3, 4], 1))])
    gap = LogprobGate(config).gap(batch, torch.tensor([0, -1.5, -0.5, -2.0]), 0)
    assert (gap.total, gap.largest) == (pytest.approx(sum(apart), abs=1e-6), pytest.approx(max(apart)))


@pytest.mark.parametrize(
    ("gap", "passes"),
    [
        (LogprobGap(), True),
        (LogprobGap(100, 0.05, 0.009, "task 1"), True),
        (LogprobGap(100, 0.05, 0.011, "task 1"), False),
        (LogprobGap(10, 0.02, 0.009, "task 1"), False),
    ],
)
def test_both_bounds_are_kept(tmp_path: Path, gap: LogprobGap, passes: bool) -> None:
    LogprobGate(config_of(tmp_path, LogprobGateConfig(on_mismatch="warn"))).judge(gap, 3)
    if passes:
        LogprobGate(config_of(tmp_path)).judge(gap, 3)
        return
    with pytest.raises(
        BehaviourMismatchError, match=r"'transformers'.* of version 3.*\(task 1\).*0.01 and 0.001"
    ):
        LogprobGate(config_of(tmp_path)).judge(gap, 3)


def test_bounds_are_those_of_the_dtype_unless_they_are_set() -> None:
    assert LogprobGateConfig().bounds("float32") == (0.01, 0.001)
    assert LogprobGateConfig().bounds("bfloat16") == (10.0, 0.1)
    assert LogprobGateConfig(max=1.0, mean=0.5).bounds("float32") == (1.0, 0.5)
    with pytest.raises(ConfigError, match=r"^learner.logprob_gate.max = 0"):
        Config(learner=LearnerConfig(logprob_gate=LogprobGateConfig(max=0.0)))


def probes_of(tmp_path: Path, says_PV: torch.Tensor, lineage: int) -> LogprobProbes:
    """Of a learner that always says the same; η = 1."""

    class Backend:
        rank = 0

        @property
        def policy(self) -> Any:
            return self

        def predict_next(self, batch: MicroBatch) -> torch.Tensor:
            return says_PV

    config = config_of(tmp_path)
    tiny_model(Path(config.model.path))
    return LogprobProbes(config, Backend(), LogprobGate(config), lineage)  # type: ignore[arg-type]


def test_a_report_is_compared_at_its_temperature_once_and_in_its_lineage(tmp_path: Path) -> None:
    logits_PV = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    probes = probes_of(tmp_path, logits_PV.log_softmax(-1), lineage=2)
    probes.note(4)
    right = (logits_PV / 0.5).log_softmax(-1)[[0, 1], [1, 0]].tolist()
    report = {"lineage": 2, "version": 4, "temperature": 0.5, "tokens": [1, 0], "logprobs": right}
    told = probes.judge({"g0": {"probes": [report]}, "g1": {}, "g2": {"probes": [report]}})
    assert told == {
        "train/logprob_gap/probe/tokens": 4,
        "train/logprob_gap/probe/max": pytest.approx(0, abs=1e-6),
        "train/logprob_gap/probe/mean": pytest.approx(0, abs=1e-6),
    }
    wrong = {**report, "temperature": 1.0}
    assert probes.judge({"g0": {"probes": [wrong]}}) == {"train/logprob_gap/probe/tokens": 0}
    for other in ({**wrong, "lineage": 1}, {**wrong, "version": 5}):
        assert probes.judge({"g3": {"probes": [other]}}) == {"train/logprob_gap/probe/tokens": 0}
    with pytest.raises(BehaviourMismatchError, match=r"version 4.*\(g3\)"):
        probes.judge({"g3": {"probes": [wrong]}})


def test_versions_long_gone_are_forgotten(tmp_path: Path) -> None:
    probes = probes_of(tmp_path, torch.zeros(1, 2).log_softmax(-1), lineage=0)
    for version in range(20):
        probes.note(version)
    wrong = {"lineage": 0, "temperature": 1.0, "tokens": [0], "logprobs": [-9.0]}
    assert probes.judge({"g": {"probes": [{**wrong, "version": 10}]}}) == {
        "train/logprob_gap/probe/tokens": 0
    }
    with pytest.raises(BehaviourMismatchError):
        probes.judge({"g": {"probes": [{**wrong, "version": 11}]}})


# ---- samples of a cut support


def test_a_cut_support_is_trained_on_only_where_tokens_are_weighed_by_it(tmp_path: Path) -> None:
    def config(generator: Mapping[str, Any], **algorithm: Any) -> Config:
        sizes = {"max_length": 32, "max_tokens": 8}
        return small_config(
            tmp_path, generator=GeneratorConfig(**sizes, **generator), algorithm=AlgorithmConfig(**algorithm)
        )

    for key, value in {"top_p": 0.9, "top_k": 20, "min_p": 0.05}.items():
        with pytest.raises(ConfigError, match=rf"^generator.{key} = .*evaluation.{key} is free"):
            config({key: value})
        config({key: value}, truncated="weigh")
        config({key: value}, truncated="weigh", proximal="frozen", correction=CorrectionConfig(kind="tis"))
        for unweighed in ({"proximal": "frozen"}, {"loss": "reinforce"}, {"loss": "gspo"}):
            with pytest.raises(ConfigError, match=r"^algorithm.truncated = 'weigh': needs tokens weighed"):
                config({key: value}, truncated="weigh", **unweighed)
    for bad in ({"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}, {"min_p": 1.0}):
        with pytest.raises(ConfigError, match=rf"^generator.{next(iter(bad))} = "):
            Config(generator=GeneratorConfig(**bad))  # type: ignore[arg-type]


# ---- planted


@dataclass
class LivePool(FakeQueue):
    """A queue in front of a real batch of slots that follows the publisher; spoil: what goes wrong after a flip.

    lag: versions that the groups are behind their step, whose own tokens are then in none of them.
    """

    config: Config = field(kw_only=True)
    spoil: Callable[[LivePool], None] = lambda pool: None
    hot: float = 1.0
    lag: int = 0

    def __post_init__(self) -> None:
        tiny_model(Path(self.config.model.path))
        self.model = load_causal_lm(self.config.model, self.config.run.seed, ATTENTION)
        self.live = {name: parameter.data for name, parameter in self.model.named_parameters()}
        self.slots = SlotBatch(self.model, slots=8, max_length=32, end_ids=[19], version=0)
        self.history: dict[int, dict[str, torch.Tensor]] = {}
        self.alone = threading.Lock()
        self.make = self.sampled

    def flip(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.history[version] = {name: tensor.clone() for name, tensor in weights.items()}
        at = max(min(self.history), version - self.lag)
        self.slots.flip(self.history[at], self.live, at)
        if at:
            self.spoil(self)

    def drawn(self, prompt: np.ndarray, ordinal: int, n: int, most: int) -> list[Any]:
        """What is recorded says nothing of `hot`."""
        with self.alone:  # reports and claims come in two threads
            self.slots.add(SampleRequest("r", prompt, Sampling(self.hot, most), ordinal, n))
            while not (done := self.slots.step()):
                pass
        return done[0][1]

    def sampled(self, ordinal: int) -> Group:
        turns = self.drawn(np.array([1 + ordinal % 8, 2]), ordinal, 4, 8)
        rollouts = [
            dataclasses.replace(Rollout.from_turn(turn), reward=float(i % 2)) for i, turn in enumerate(turns)
        ]
        return Group.from_rollouts(Task(ordinal, ""), Sampling(1.0, 8), rollouts)

    def trained(self, *args: Any, step: int, **options: Any) -> Trained:
        answer = super().trained(*args, step=step, **options)
        turns = [self.drawn(prompt, p, 1, 1)[0] for p, prompt in enumerate(prompts(33, 32))]
        report = {
            "lineage": 0,
            "version": self.slots.version,
            "temperature": 1.0,
            "tokens": [int(turn.output_ids[0]) for turn in turns],
            "logprobs": [float(turn.logprobs[0]) for turn in turns],
        }
        return dataclasses.replace(answer, stats={"g0": {**answer.stats["g0"], "probes": [report]}})


@dataclass
class FlippingPublisher(FakePublisher):
    pool: LivePool | None = None

    def publish(self, version: int) -> Any:
        published = super().publish(version)
        assert self.pool is not None
        self.pool.flip(self.live, version)
        return published


def trained_with(pool: LivePool) -> list[dict[str, Any]]:
    config = pool.config
    backend = FsdpBackend(config, requirements.models(config))
    publisher = FlippingPublisher(backend.local_tensors(), pool=pool)
    folder = Path(config.run.dir) / config.run.name
    trainer = open_trainer(
        config,
        backend,
        pool,  # type: ignore[arg-type]
        lambda _: publisher,  # type: ignore[arg-type,return-value]
        keys=None,
        stop=threading.Event(),
        heldout={},
        status=ProcessStatus(),
        turn=DeviceTurn.always(),
    )
    trainer.run()
    assert trainer.version == config.run.versions
    return [row for row in read_rows(folder / "metrics.jsonl") if "perf/step_s" in row]


def heavier(pool: LivePool) -> None:
    """One number of one parameter is not the learner's."""
    pool.live["model.layers.0.mlp.down_proj.weight"][3, 5] += 1.0


def hotter(pool: LivePool) -> None:
    pool.hot = 1.3


def test_an_engine_with_the_learners_weights_passes_every_step(tmp_path: Path) -> None:
    rows = trained_with(LivePool(config=config_of(tmp_path)))
    assert [row["train/logprob_gap/train/tokens"] > 0 for row in rows] == [True] * 3
    assert max(row["train/logprob_gap/train/max"] for row in rows) < 1e-4
    assert max(row["train/logprob_gap/probe/max"] for row in rows) < 1e-4
    # The parameters do move: what is compared is not the same in every version.
    lagging = trained_with(LivePool(config=config_of(tmp_path / "lagging"), lag=1))
    assert [row["train/logprob_gap/train/tokens"] > 0 for row in lagging] == [True, False, False]
    assert min(row["train/ratio/max"] for row in lagging[1:]) > 1.01
    assert max(row["train/logprob_gap/probe/max"] for row in lagging) < 1e-4


@pytest.mark.parametrize("spoil", [heavier, hotter])
def test_what_goes_wrong_in_a_flip_is_found_in_the_groups_before_a_step(
    tmp_path: Path, spoil: Callable[[LivePool], None]
) -> None:
    pool = LivePool(config=config_of(tmp_path, LogprobGateConfig(probe=False)), spoil=spoil)
    with pytest.raises(BehaviourMismatchError, match=r"'transformers'.* of version 1.*\(task [23]\)"):
        trained_with(pool)
    assert pool.of("trained") == [0]
    warned = config_of(tmp_path / "warned", LogprobGateConfig(probe=False, on_mismatch="warn"))
    assert len(trained_with(LivePool(config=warned, spoil=spoil))) == 3


@pytest.mark.parametrize("spoil", [heavier, hotter])
def test_or_by_a_probe_where_no_group_of_a_step_is_of_its_version(
    tmp_path: Path, spoil: Callable[[LivePool], None]
) -> None:
    pool = LivePool(config=config_of(tmp_path), spoil=spoil, lag=1)
    with pytest.raises(BehaviourMismatchError, match=r"4 tokens of version 1.*\(g0\)"):
        trained_with(pool)


def test_an_engine_that_is_wrong_from_the_start_moves_nothing(tmp_path: Path) -> None:
    pool = LivePool(config=config_of(tmp_path), hot=1.3)
    before = copy.deepcopy(pool.live)
    with pytest.raises(BehaviourMismatchError, match="of version 0"):
        trained_with(pool)
    assert pool.of("trained") == []
    assert all(torch.equal(before[name], pool.live[name]) for name in before)


def test_a_resumed_learner_says_nothing_of_versions_that_its_former_self_published_too(
    tmp_path: Path,
) -> None:
    """Groups of an abandoned branch may come again, with version numbers that this learner gives to other weights."""

    def versions(count: int) -> Config:
        gate = LogprobGateConfig(probe=False)
        run = RunConfig(name="case", dir=str(tmp_path), versions=count, resume=True)
        every = CheckpointConfig(every=2)
        return dataclasses.replace(config_of(tmp_path, gate), run=run, checkpoint=every)

    trained_with(LivePool(config=versions(3)))
    shutil.rmtree(tmp_path / "case" / "checkpoints" / "v000003")

    def beyond_the_restored(pool: LivePool) -> None:
        if pool.slots.version > 2:
            heavier(pool)

    pool = LivePool(config=versions(7), spoil=beyond_the_restored)
    with pytest.raises(BehaviourMismatchError, match="of version 5"):
        trained_with(pool)
    assert pool.of("trained") == [2, 3, 4]


# ---- docs


def test_the_configurations_of_the_page_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "sampling.md").read_text()
    examples = page.split("```yaml\n")[1:]
    base = "model: {path: somewhere}\ntasks: {source: tasks.jsonl}\nreward: {function: some.where:reward}\n"
    for number, example in enumerate(examples):
        file = tmp_path / f"{number}.yaml"
        file.write_text(base + example.split("```")[0])
        load_config(file)
    assert len(examples) == 4
    file.write_text(base + "generator: {top_p: 0.98}\nalgorithm: {truncated: weigh, proximal: frozen}\n")
    with pytest.raises(ConfigError, match=r"^algorithm.truncated"):
        load_config(file)


def test_a_mismatch_is_an_event_of_the_trace(tmp_path: Path, trace: Any) -> None:
    gate = LogprobGate(config_of(tmp_path, LogprobGateConfig(on_mismatch="warn")))
    gate.judge(LogprobGap(100, 0.05, 0.009, "task 1"), 2)
    gate.judge(LogprobGap(10, 0.02, 0.009, "task 1"), 3)
    (event,) = trace().events
    assert (event.name, event.about["version"], event.about["where"]) == ("logprob_mismatch", 3, "task 1")
    assert event.about["mean"] == pytest.approx(0.002)
