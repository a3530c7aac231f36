"""Every key a user can set: one dataclass per YAML section (`sections/`), each key with its default and help text.

`load.py` merges files and command line into `Config`, which checks itself when it is made: each value by its type, the
rules among the keys of a section (`rules.py`), and those among sections, which stand here. All that is wrong
is in one `ConfigError`, raised before a process starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Literal

from asyncrl.config.addresses import is_loopback, listening_rule
from asyncrl.config.rules import Rule, Section, check_section, require
from asyncrl.config.sections.agent import AgentConfig
from asyncrl.config.sections.algorithm import GROUP_ADVANTAGES, AlgorithmConfig, policy_rules
from asyncrl.config.sections.generator import (
    GeneratorConfig,
    errors_of_pool,
    key_of_pool,
    pool_rules,
    pool_section,
    sharing_rules,
)
from asyncrl.config.sections.learner import LearnerConfig
from asyncrl.config.sections.models import (
    CriticConfig,
    ModelConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)
from asyncrl.config.sections.offline import DpoConfig, RewardModelTrainingConfig, SftConfig
from asyncrl.config.sections.placement import REWARDS, PlacementConfig
from asyncrl.config.sections.queue import QueueConfig
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.config.sections.run import (
    BatchConfig,
    CheckpointConfig,
    LaunchConfig,
    RunConfig,
    TelemetryConfig,
)
from asyncrl.config.sections.sync import SyncConfig
from asyncrl.config.sections.tasks import EvaluationConfig, TasksConfig

LOST_HEARTBEATS, LEAST_LEASE_S = 3, 6.0
"""A worker that misses so many heartbeats loses its leases, but no sooner: a busy machine delays heartbeats too."""


@dataclass(frozen=True)
class Config(Section):
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    reward_model_training: RewardModelTrainingConfig = field(default_factory=RewardModelTrainingConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)

    def __post_init__(self) -> None:
        check_section(self)

    def rules(self, at: str) -> Iterator[Rule]:
        """The rules among sections."""
        host = self.sync.host
        yield listening_rule("sync.host", host is None or is_loopback(host), self.queue.keys)
        yield Rule(
            not self.launch.timings or self.telemetry.trace_mb > 0,
            "launch.timings",
            "reads the traces, and telemetry.trace_mb=0 turns them off",
            "set telemetry.trace_mb=64, its default",
            True,
        )
        yield Rule(
            not self.generator.speculation.tokens or not self.fixed_shape,
            "generator.speculation.tokens",
            "needs steps of as many tokens as there are, not of a fixed shape",
            "set generator.fixed_shape=false, or generator.speculation.tokens=0",
        )
        yield from _size_rules(self)
        yield from _length_rules(self)
        yield from _evaluation_rules(self)
        yield from policy_rules(self.algorithm, self.learner.mini_batches * self.learner.epochs)
        yield from _truncation_rules(self.algorithm, self.generator)
        yield from _quantization_rules(self)
        yield from _lora_rules(self)
        yield from _router_rules(self)
        yield from _model_rules(self)
        yield _curriculum_rule(self)
        yield from _broadcast_rules(self)
        yield from _pool_rules(self)
        if self.placement.colocate:
            yield from _colocation_rules(self)
        else:
            yield from sharing_rules(self.generator, self.learner.devices, self.learner.gpu_memory_share)
        yield from pool_rules(self.generator_pools)

    @cached_property
    def generator_pools(self) -> Mapping[str, GeneratorConfig]:
        """The section `generator` of each pool of generators, by its name; that of `generator` itself is ''."""
        others = (name for name, entry in self.placement.generators.items() if entry is not None)
        return {"": self.generator, **{name: self.of_pool(name).generator for name in others}}

    def of_pool(self, name: str) -> Config:
        """The configuration of a generator of a pool, as if there were no other kind. It takes no turns with the
        learner, unless it is of the first pool, ''. Raises ConfigError for an unknown name, and under the pool's keys.
        """
        if not name:
            return self
        at, pools = key_of_pool(name), self.placement.generators
        remedy = f"there are {', '.join(pools)}" if pools else f"add {at}.count=1"
        require(pools.get(name) is not None, at, name, "there is no such pool of generators", remedy)
        generator = pool_section(self.generator, name, pools[name])
        with errors_of_pool(name):
            placement = dataclasses.replace(self.placement, generators={}, colocate=False)
            return dataclasses.replace(self, generator=generator, placement=placement)

    def rewards_of(self, kind: Literal["generator", "pool"]) -> RewardConfig | None:
        """The reward functions that this kind of process calls; None if it calls none."""
        place = self.placement.rewards
        if place.where == "colocated":
            return self.reward if kind == "generator" else None
        pooled = place.functions or [*self.reward.functions]
        left = [name for name in self.reward.functions if name not in pooled]
        if kind == "pool":
            return self.reward.without(left)
        return self.reward.without(pooled) if left else None

    @property
    def window(self) -> int:
        """W, resolved."""
        if self.queue.window is not None:
            return self.queue.window
        return 1 if self.queue.max_staleness <= 1 else self.batch.groups + 1

    @property
    def spare_versions(self) -> int:
        """S = η - ceil((W - 1) / B): versions that a lease may run ahead."""
        return self.queue.max_staleness - math.ceil((self.window - 1) / self.batch.groups)

    @property
    def depth(self) -> int:
        """Groups leased or ready at once, resolved."""
        if self.queue.depth is not None:
            return self.queue.depth
        return (self.queue.max_staleness + 1) * self.batch.groups

    @property
    def lease_s(self) -> float:
        """Silence of a worker after which its leases end, resolved."""
        if self.queue.lease_s is not None:
            return self.queue.lease_s
        return max(LOST_HEARTBEATS * self.generator.heartbeat_s, LEAST_LEASE_S)

    @property
    def greedy_rollout(self) -> bool:
        """Whether generators add one greedy rollout to each group, whose reward the others are compared with. They load
        no `own_advantage`; one that needs the greedy rollout has `advantage: remax` beside it."""
        return self.algorithm.advantage == "remax"

    @property
    def probing(self) -> bool:
        """Whether generators draw the probes of `learner.logprob_gate`. At η = 0 every token is compared anyway."""
        real = self.generator.makes_real_tokens
        return real and self.learner.logprob_gate.probe and self.queue.max_staleness > 0

    @property
    def fixed_shape(self) -> bool:
        """Whether the embedded engine decodes at fixed shape, resolved."""
        if self.generator.fixed_shape is not None:
            return self.generator.fixed_shape
        return self.queue.max_staleness == 0


def _size_rules(config: Config) -> Iterator[Rule]:
    """Rollouts within groups, groups within versions and the queue."""
    batch, queue, algorithm = config.batch, config.queue, config.algorithm
    advantage = algorithm.built_in_advantage
    yield Rule(
        advantage not in GROUP_ADVANTAGES or batch.group_size >= 2,
        "batch.group_size",
        f"advantage '{advantage}' compares the rollouts of a group and needs at least 2",
        "set batch.group_size=8",
    )
    yield Rule(
        algorithm.filter == "none" or batch.group_size >= 2,
        "algorithm.filter",
        f"would drop every group: one of batch.group_size={batch.group_size} has no spread",
        "set algorithm.filter=none, or batch.group_size=8",
    )
    yield Rule(
        algorithm.pass_k is None or algorithm.pass_k <= batch.group_size,
        "algorithm.pass_k",
        f"a group of batch.group_size={batch.group_size} rollouts has no best of so many",
        f"set batch.group_size={algorithm.pass_k} or more",
    )
    yield Rule(
        config.learner.mini_batches <= batch.groups,
        "learner.mini_batches",
        f"splits the groups of a version, of which there are batch.groups={batch.groups}",
        f"set learner.mini_batches={batch.groups} or less",
    )
    least = batch.groups + config.window - 1
    yield Rule(
        config.spare_versions >= 0,
        "queue.window",
        f"a window of {config.window} over batches of {batch.groups} leaves no room under "
        f"queue.max_staleness={queue.max_staleness}: η - ceil((W - 1) / B) is negative",
        f"set queue.window to at most {queue.max_staleness * batch.groups + 1}",
        config.window,
    )
    yield Rule(
        config.depth >= least,
        "queue.depth",
        f"must hold one batch and the window: batch.groups + window - 1 = {least}",
        f"set queue.depth={least} or more",
        config.depth,
    )


def _length_rules(config: Config) -> Iterator[Rule]:
    """Tokens within sequences, and seconds within leases."""
    generator, algorithm = config.generator, config.algorithm
    yield Rule(
        algorithm.shaping.overlong_buffer <= generator.max_tokens,
        "algorithm.shaping.overlong_buffer",
        f"is a part of generator.max_tokens={generator.max_tokens}",
        f"set algorithm.shaping.overlong_buffer={generator.max_tokens // 4}",
    )
    yield Rule(
        generator.max_tokens < generator.max_length,
        "generator.max_tokens",
        f"must leave room for a prompt under generator.max_length={generator.max_length}",
        f"set generator.max_length above {generator.max_tokens}",
    )
    yield Rule(
        (config.agent.max_tokens or 1) <= generator.max_length,
        "agent.max_tokens",
        f"is more than the engine holds of one sequence, generator.max_length={generator.max_length}",
        "set generator.max_length higher, or leave agent.max_tokens out",
    )
    yield Rule(
        generator.heartbeat_s < config.lease_s,
        "generator.heartbeat_s",
        f"renews leases later than they end, by queue.lease_s={config.lease_s:g}",
        f"set generator.heartbeat_s={config.lease_s / LOST_HEARTBEATS:g} or less, or leave queue.lease_s out",
    )


def _evaluation_rules(config: Config) -> Iterator[Rule]:
    evaluation, slots = config.evaluation, config.generator.slots
    for name, chosen in evaluation.named_sets.items():
        at = f"evaluation.sets.{name}" if name else "evaluation"
        yield Rule(
            chosen.samples <= slots,
            f"{at}.samples",
            f"is more than the engine decodes at once, generator.slots={slots}",
            f"set {at}.samples={slots}, or more slots",
            chosen.samples,
        )
    yield Rule(
        config.run.target_accuracy is None or not evaluation.sets or evaluation.source is not None,
        "run.target_accuracy",
        "is of the tasks of evaluation.source, which is not set",
        "set it to the source of one of evaluation.sets",
    )


def _truncation_rules(algorithm: AlgorithmConfig, generator: GeneratorConfig) -> Iterator[Rule]:
    """Samples of a cut support are trained on only where `algorithm.truncated` allows it and π/μ weighs each token."""
    cuts = {"top_p": generator.top_p < 1, "top_k": generator.top_k > 0, "min_p": generator.min_p > 0}
    for name in (name for name, cut in cuts.items() if cut):
        yield Rule(
            algorithm.truncated == "weigh",
            f"generator.{name}",
            "cuts tokens off that the learner's policy gives a probability: the samples are not that policy's, and "
            "recorded and recomputed log-probs are of two distributions",
            f"unset it (evaluation.{name} is free), or set algorithm.truncated=weigh",
        )
    yield Rule(
        algorithm.truncated == "refuse" or algorithm.weighs_behaviour or not any(cuts.values()),
        "algorithm.truncated",
        f"needs tokens weighed against what they were drawn from, and loss {algorithm.loss!r} with proximal "
        f"{algorithm.proximal!r} and algorithm.correction.kind=none leaves that out",
        "set algorithm.proximal=frozen algorithm.correction.kind=tis",
    )


def _quantization_rules(config: Config) -> Iterator[Rule]:
    """Tokens of quantized weights are another policy's, and π/μ must weigh them."""
    quantization = config.generator.quantization
    for holds, rule, remedy in (
        (
            config.algorithm.weighs_behaviour,
            "draws tokens from other weights than the learner's, and loss "
            f"{config.algorithm.loss!r} with proximal {config.algorithm.proximal!r} and algorithm.correction.kind=none "
            "does not weigh them by what they were drawn from",
            "set algorithm.correction.kind=tis",
        ),
        (
            config.generator.own_engine is not None or not config.generator.behind_http,
            f"is not for engine {config.generator.engine!r}, which takes whole weights",
            "leave it out, or set generator.engine=vllm or transformers",
        ),
        (
            config.sync.backend != "vllm",
            "is not for sync.backend=vllm, which sends whole weights",
            "set sync.backend=auto",
        ),
        (
            not config.model.lora.travels,
            "is of whole weights, and adapters alone travel",
            "set model.lora.publish=merged",
        ),
    ):
        yield Rule(quantization is None or holds, "generator.quantization", rule, remedy)


def _lora_rules(config: Config) -> Iterator[Rule]:
    """Adapters exclude some other keys."""
    generator = config.generator
    yield Rule(
        generator.engine != "vllm_server" or (generator.server.folder is None) != config.model.lora.travels,
        "generator.server.folder",
        "is where generator.engine=vllm_server reads versions of adapters alone, and takes no others",
        "set it with model.lora.publish=adapter, and leave it out with merged or without model.lora",
    )
    if config.model.lora.rank == 0:
        return
    yield Rule(
        config.reference.update_every is None,
        "reference.update_every",
        "the reference of a policy with adapters is what they were put into, and that stays as it is",
        "leave it out, or set model.lora.rank=0",
    )
    for name, takes in (
        ("generator.engine", generator.engine != "sglang"),
        ("sync.backend", config.sync.backend != "vllm"),
    ):
        yield Rule(
            takes or not config.model.lora.travels,
            name,
            "takes whole weights, and adapters alone travel",
            "set model.lora.publish=merged",
        )


def _router_rules(config: Config) -> Iterator[Rule]:
    """Recorded experts need an engine that records them, and layers that take them."""
    if not config.model.router_replay:
        return
    generator, learner = config.generator, config.learner
    yield Rule(
        generator.own_engine is not None or not generator.behind_http,
        "generator.engine",
        "records no choices of routers",
        "set generator.engine=vllm or transformers, or model.router_replay=false",
    )
    for name, plain in {"backend": "fsdp", "compile": False, "parallel.tensor": 1}.items():
        yield Rule(
            attrgetter(name)(learner) == plain,
            f"learner.{name}",
            "does not take recorded experts",
            f"set learner.{name}={str(plain).lower()}, or model.router_replay=false",
        )


def _curriculum_rule(config: Config) -> Rule:
    return Rule(
        config.tasks.curriculum.solved is None or REWARDS not in config.placement.pools,
        "tasks.curriculum.solved",
        "needs the rewards of each group in its generator, and placement.rewards has them on a pool",
        "set placement.rewards.where=colocated, or tasks.curriculum.solved=null",
    )


def _model_rules(config: Config) -> Iterator[Rule]:
    """An algorithm needs certain models beside the policy, and certain rewards."""
    algorithm = config.algorithm
    advantage, cost = algorithm.built_in_advantage, algorithm.cost_part
    yield Rule(
        (advantage != "distill" and "teacher" not in algorithm.kl_terms) or config.teacher.path is not None,
        "teacher.path",
        "names the model that advantage 'distill' and algorithm.teacher_loss learn from",
        "set it to a model with the tokenizer of model.path",
    )
    yield Rule(
        advantage != "safe_rlhf" or cost in config.reward.weights,
        "reward.weights",
        f"must say what the cost, the part {cost!r}, counts in the reward: by default as much as any other part",
        f"set reward.weights.{cost}=0",
    )
    yield Rule(
        not config.greedy_rollout or all(reward.per == "rollout" for reward in config.reward.each),
        "algorithm.advantage",
        "adds a greedy rollout to a group, which would change the rewards of the others under 'per: group'",
        "set algorithm.advantage=rloo, or per=rollout",
    )
    yield Rule(
        config.critic.warmup_versions < config.run.versions,
        "critic.warmup_versions",
        f"leaves the policy none of run.versions={config.run.versions} to learn in",
        f"set critic.warmup_versions={config.run.versions // 10}",
    )


def _broadcast_rules(config: Config) -> Iterator[Rule]:
    """Weights by vLLM's own weight transfer."""
    generator = config.generator
    extra = "weight_transfer_config" in generator.vllm.extra
    for name, holds, why, remedy in (
        (
            "sync.backend",
            generator.on_vllm,
            "is for generator.engine=vllm",
            "set generator.engine=vllm, or sync.backend=auto",
        ),
        (
            "generator.kv",
            generator.kv != "drain",
            "keeps the turn of sync.backend=vllm from other engines until all samples have ended",
            "set generator.kv=keep or recompute, or sync.backend=auto",
        ),
        (
            "generator.vllm.extra",
            not extra,
            "has weight_transfer_config, which sync.backend=vllm sets",
            "leave weight_transfer_config out",
        ),
    ):
        yield Rule(config.sync.backend != "vllm" or holds, name, why, remedy)


def _colocation_rules(config: Config) -> Iterator[Rule]:
    """Pools that take turns have the same devices, and while one has them the other's memory is the host's."""
    generator, learner, sync = config.generator, config.learner, config.sync
    theirs, ours = (set((names or "").split(",")) for names in (generator.devices, learner.devices))
    for name, holds, why, remedy in (
        (
            "generator.engine",
            generator.own_engine is not None or generator.engine in ("transformers", "vllm"),
            "gives no memory up, and with placement.colocate it takes turns with the learner",
            "set generator.engine=vllm or transformers",
        ),
        (
            "learner.backend",
            learner.own_backend is not None or learner.backend == "fsdp",
            "gives no memory up, and with placement.colocate it takes turns with the generators",
            "set learner.backend=fsdp",
        ),
        (
            "learner.devices",
            theirs == ours,
            f"are not generator.devices={generator.devices}, and with placement.colocate both take turns on the same",
            f"set learner.devices='{generator.devices}'",
        ),
        (
            "sync.staging",
            sync.receives_on_host,
            "lies on the device while the learner has it, with placement.colocate",
            "set sync.staging=host",
        ),
        (
            "sync.snapshot_device",
            sync.snapshot_device == "host",
            "keeps snapshots on the device while generators have it, with placement.colocate",
            "set sync.snapshot_device=host",
        ),
        (
            "sync.backend",
            sync.backend not in ("nccl", "vllm"),
            "sends from device to device, and with placement.colocate both ends are one",
            "set sync.backend=auto",
        ),
    ):
        yield Rule(holds, name, why, f"{remedy}, or placement.colocate=false")
    for name, pool in config.generator_pools.items():
        yield Rule(
            not name or pool.devices is not None,
            f"{key_of_pool(name)}.devices",
            "is not set, and a pool beside generators with placement.colocate takes no turns on the GPUs of these",
            f"name GPUs of its own, {key_of_pool(name)}.devices=2,3, or '' for none",
            pool.devices,
        )


def _pool_rules(config: Config) -> Iterator[Rule]:
    """Nothing on a pool follows the policy; a model that learns there has one process; reward functions there read the
    groups that the queue carries."""
    pools = config.placement.pools
    yield Rule(
        "reference" not in pools or config.reference.update_every is None,
        "reference.update_every",
        "makes the reference follow the policy, whose weights a pool does not get",
        "set placement.reference.where=colocated, or leave it out",
    )
    frozen = {"reference", "teacher", REWARDS} | ({"reward_model"} if config.reward_model.frozen else set())
    for name in pools.keys() - frozen - config.placement.own.keys():
        yield config.placement.one_process(name)
    if REWARDS not in pools:
        return
    for name in config.placement.rewards.functions:
        yield Rule(
            name in config.reward.functions,
            "placement.rewards.functions",
            f"{name!r} is not one of reward.functions",
            f"name some of {', '.join(config.reward.functions) or 'them, or leave it out'}",
        )
    yield Rule(
        not config.greedy_rollout,
        "placement.rewards.where",
        f"advantage {config.algorithm.advantage!r} compares with a greedy rollout, which groups do not carry",
        "set placement.rewards.where=colocated, or algorithm.advantage=rloo",
    )
