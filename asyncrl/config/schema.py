"""Every key a user can set: one dataclass per YAML section, one comment per key.

`load.py` merges files and command line into `Config`; each section checks itself when it is made, and
`Config` checks what no section can see alone. Whatever fails raises `ConfigError` before a process starts.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl.config.sections.agent import AgentConfig
from asyncrl.config.sections.algorithm import GROUP_ADVANTAGES, OWN_WEIGHTS, AlgorithmConfig
from asyncrl.config.sections.limits import (
    Amount,
    AnyBytes,
    BelowOne,
    Bytes,
    Count,
    NotNegative,
    Positive,
    Processes,
    Seconds,
    Seed,
    Share,
    Threads,
    check_values,
)
from asyncrl.config.sections.lora import LoraConfig, check_lora
from asyncrl.config.sections.parallel import ParallelConfig
from asyncrl.config.sections.placement import REWARDS, PlacementConfig
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.config.sections.rules import check_devices, check_name, check_redis_url, check_support, require
from asyncrl.config.sections.tasks import EvaluationConfig, TasksConfig
from asyncrl.config.sections.telemetry import TelemetryConfig

KvAtFlip = Literal["keep", "recompute", "drain"]


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"  # names the run folder, and keeps clients of another run out
    dir: str = "runs"  # the run folder is dir/name
    seed: Seed = 0  # fixes task order, sampling and initialisation
    versions: Count = 100  # policies to publish, then the run ends
    resume: bool = False  # go on from the newest checkpoint of the run folder
    resume_changed: bool = False  # let it go on with other tasks, another seed or another model.path
    target_accuracy: float | None = None  # end early once the held-out accuracy reaches this

    def __post_init__(self) -> None:
        check_values("run", self)
        check_name("run.name", self.name)
        require(bool(self.dir), "run.dir", self.dir, "names no folder", "set run.dir=runs")
        object.__setattr__(self, "dir", os.path.expanduser(self.dir))
        rule, remedy = (
            "begins with ~, and there is no such user",
            "write the whole path, or ./~… for that name",
        )
        require(not self.dir.startswith("~"), "run.dir", self.dir, rule, remedy)


@dataclass(frozen=True)
class ModelConfig:
    path: str = (
        "???"  # Hugging Face folder or hub name; a folder with config.json alone starts from random weights
    )
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the policy, in both pools
    trust_remote_code: bool = False  # run model code that comes with the checkpoint
    lora: LoraConfig = field(default_factory=LoraConfig)  # train adapters only: docs/models.md


@dataclass(frozen=True)
class BatchConfig:
    groups: Count = 64  # B: groups that one version is trained on
    group_size: Count = 8  # n: rollouts of one task

    def __post_init__(self) -> None:
        check_values("batch", self)


@dataclass(frozen=True)
class VllmConfig:
    """Only for generator.engine=vllm; what is not here is set by `extra`."""

    tensor_parallel: Processes = 1  # ranks that one generator's model is split over
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of the model there; none: model.dtype
    kv_cache_mb: Count | None = (
        None  # KV cache of one rank; none: gpu_memory_share, on a CPU what all slots may need
    )
    gpu_memory_share: Positive = 0.9  # of each GPU, for weights and KV cache together
    enforce_eager: bool = False  # no CUDA graphs; never any on a CPU
    extra: dict[str, Any] = field(default_factory=dict)  # further arguments of vllm.AsyncEngineArgs

    def __post_init__(self) -> None:
        check_values("generator.vllm", self)
        require(
            self.gpu_memory_share <= 1,
            "generator.vllm.gpu_memory_share",
            self.gpu_memory_share,
            "is a share of the memory",
            "set generator.vllm.gpu_memory_share=0.9",
        )


@dataclass(frozen=True)
class ServerConfig:
    """Only for generator.engine=vllm_server and sglang: servers that run already; see docs/engines.md."""

    urls: list[str] = field(
        default_factory=list
    )  # http://host:port; generator-k alone asks and updates the k-th
    folder: str | None = (
        None  # engine sglang: where generators write versions; each server must see its own's
    )
    key_variable: str | None = None  # environment variable with the servers' API key
    deadline_s: Seconds = 300.0  # a server that does not answer for so long ends its generator

    def __post_init__(self) -> None:
        check_values("generator.server", self)
        for url in self.urls:
            require(
                url.startswith(("http://", "https://")),
                "generator.server.urls",
                url,
                "is no address of an HTTP server",
                "set generator.server.urls=[http://127.0.0.1:8000]",
            )
        require(
            len(set(self.urls)) == len(self.urls),
            "generator.server.urls",
            self.urls,
            "names a server twice, but each generator updates the weights of its own",
            "start a server for each generator",
        )


@dataclass(frozen=True)
class GeneratorConfig:
    engine: Literal["transformers", "vllm", "vllm_server", "sglang", "scripted"] = "transformers"
    own_engine: str | None = None  # in place of engine, see docs/engines.md
    count: Processes = 1  # generator processes that `asyncrl train` starts
    slots: Count = 256  # sequences decoded at once (rows of the static KV cache)
    max_length: Count = 1024  # prompt + output tokens of one sequence (columns of the static KV cache)
    max_tokens: Count = 256  # output tokens of one turn
    temperature: Positive = 1.0
    top_p: float = 1.0  # draw from the fewest tokens that have this mass; below 1 see algorithm.truncated
    top_k: Amount = 0  # draw from so many of the likeliest tokens; 0: all; above 0 see algorithm.truncated
    min_p: float = (
        0.0  # draw from tokens at least so likely, as a share of the likeliest; see algorithm.truncated
    )
    on_failure: Literal["retry", "drop", "stop"] = (
        "retry"  # of the engine at one request: retry twice and then drop
    )
    #                                  the task with reason 'engine', drop it at once, or end the generator
    fixed_shape: bool | None = None  # always decode all slots at full length, so that a row never depends on
    #                                  its neighbours (bit-reproducible, slower); none: only at max_staleness 0
    threads: Threads | None = (
        None  # CPU threads of one process; none: cores shared out over the run's processes
    )
    devices: str | None = None  # CUDA_VISIBLE_DEVICES of the generator pool; none: as the shell has it
    kv: KvAtFlip = (
        "keep"  # samples in flight when new weights come: go on with the KV cache of the old ones, have
    )
    #                        it made again by the new ones, or are finished first by the old ones
    vllm: VllmConfig = field(default_factory=VllmConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    heartbeat_s: Seconds = 2.0  # between two renewals of all leases of a worker

    def __post_init__(self) -> None:
        check_values("generator", self)
        require(
            self.temperature > 0,
            "generator.temperature",
            self.temperature,
            "training samples need a temperature above 0",
            "set generator.temperature=1.0",
        )
        check_devices("generator.devices", self.devices)
        check_support("generator", self.top_p, self.top_k, self.min_p)
        require(
            self.kv == "keep" or self.engine != "scripted",
            "generator.kv",
            self.kv,
            "is not for generator.engine=scripted: it has no cache, and flips at once",
            "set generator.kv=keep",
        )
        self._check_server()

    @property
    def makes_real_tokens(self) -> bool:
        """Whether recorded log-probs are those of a model; scripted ones are made up."""
        return self.own_engine is not None or self.engine != "scripted"

    def _check_server(self) -> None:
        behind_http, urls = self.engine in ("vllm_server", "sglang"), self.server.urls
        require(
            bool(urls) == behind_http,
            "generator.server.urls",
            urls,
            "goes with generator.engine=vllm_server or sglang, and only with these",
            "set both, or neither",
        )
        require(
            not behind_http or len(urls) >= self.count,
            "generator.server.urls",
            urls,
            f"has fewer servers than generator.count={self.count}",
            f"name {self.count} servers, or set generator.count={max(1, len(urls))}",
        )
        require(
            (self.server.folder is not None) == (self.engine == "sglang"),
            "generator.server.folder",
            self.server.folder,
            "goes with generator.engine=sglang, and only with that",
            "set generator.server.folder=/shared/versions",
        )
        require(
            self.engine != "sglang" or (self.top_p == 1 and self.top_k == 0 and self.min_p == 0),
            "generator.engine",
            self.engine,
            "its log-probs are of all tokens, also where top_p, top_k or min_p cut some off",
            "unset these, or set generator.engine=vllm_server",
        )


def _stays_here(address: str) -> bool:
    """Whether only processes of this machine can reach a ZeroMQ address.

    >>> [_stays_here(a) for a in ("tcp://127.0.0.1:*", "tcp://[::1]:5", "ipc:///tmp/q", "tcp://*:5", "tcp://node:5")]
    [True, True, True, False, False]
    """
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    return scheme in ("ipc", "inproc") or host in ("localhost", "::1") or host.startswith("127.")


@dataclass(frozen=True)
class QueueConfig:
    address: str = "tcp://127.0.0.1:*"  # of the broker; * picks a free port (only for `asyncrl train`)
    max_staleness: Amount = (
        2  # η: versions between the oldest token of a group and the policy it trains; 0 = synchronous
    )
    window: Count | None = None  # W: groups past the oldest untrained one that may be trained first;
    #                            none: 1 (strict order) up to η = 1, else batch.groups + 1
    depth: Count | None = None  # groups leased or ready at once; none: (η + 1) * batch.groups
    max_bytes: Bytes = 4 << 30  # payload bytes held by the queue
    wait_share: float | None = (
        None  # share of its time that the learner may wait for groups: generators work ahead
    )
    #                                  no more than that takes, so data is fresher than η; none: as far as η allows
    retained_bytes: AnyBytes = (
        1 << 30
    )  # payload bytes kept for a rewind only that stay in memory; more go to the disk
    store: Literal["memory", "file", "redis"] = (
        "file"  # what a queue that dies leaves to the next: nothing, or a
    )
    #                                                     journal in the run folder or in Redis, to go on from
    durable: Literal["metadata", "payload"] = (
        "metadata"  # metadata: ready groups are generated again; payload: kept
    )
    fsync: bool = False  # survive a power failure too, not only the end of the process (store: file)
    redis_url: str | None = None  # redis://, rediss:// (TLS) or unix://, with user:password@ as needed
    lease_s: Seconds = 30.0  # a lease not renewed for this long goes back to pending
    deadline_s: Seconds = 60.0  # of every request to the queue
    keys: str | None = (
        None  # folder made by `asyncrl keys`: only its owners may talk to the broker, and encrypted;
    )
    #                          none: anybody may, so that the address must be on loopback

    def __post_init__(self) -> None:
        check_values("queue", self)
        require(
            self.address.partition("://")[0] in ("tcp", "ipc", "inproc"),
            "queue.address",
            self.address,
            "does not say how it is reached",
            f"set queue.address=tcp://{self.address.rpartition('://')[2] or '127.0.0.1:*'}",
        )
        require(
            self.keys is not None or _stays_here(self.address),
            "queue.address",
            self.address,
            "can be reached from other machines, and queue.keys is not set",
            "make keys with `asyncrl keys DIR`, copy DIR without server.key to the machines of the run that have no "
            "queue, and set queue.keys=DIR",
        )
        require(
            self.max_staleness >= 0,
            "queue.max_staleness",
            self.max_staleness,
            "cannot be negative",
            "set queue.max_staleness=0 for synchronous training",
        )
        require(
            self.wait_share is None or 0 < self.wait_share < 1,
            "queue.wait_share",
            self.wait_share,
            "is a share of the learner's time, between 0 and 1",
            "set queue.wait_share=0.05",
        )
        self._check_store()

    def _check_store(self) -> None:
        check_redis_url("queue.redis_url", self.redis_url)
        require(
            (self.redis_url is not None) == (self.store == "redis"),
            "queue.redis_url",
            self.redis_url,
            "goes with queue.store=redis, and only with that",
            "set queue.store=redis queue.redis_url=redis://127.0.0.1:6379/0",
        )
        require(
            self.store != "memory" or self.durable == "metadata",
            "queue.durable",
            self.durable,
            "a queue that keeps nothing cannot keep payloads",
            "set queue.store=file",
        )
        require(
            not self.fsync or self.store == "file",
            "queue.fsync",
            self.fsync,
            "is for files"
            + ("; a Redis server decides by its own appendfsync" if self.store == "redis" else ""),
            "set queue.store=file, or leave it out",
        )


@dataclass(frozen=True)
class SyncConfig:
    backend: Literal["auto", "shm", "nccl", "gloo", "file", "redis"] = "auto"  # how weights travel; auto: shm
    #                                    where both ends can map each other's memory, else nccl between GPUs, else gloo;
    #                                    file and redis: the learner stores versions there, and generators read them
    folder: str | None = None  # backend file: where versions are stored; every process of the run must see it
    redis_url: str | None = None  # backend redis: as queue.redis_url; may be the same server
    keep: Count = 2  # backends file and redis: newest versions that stay stored; more help slow readers
    fsync: bool = False  # backend file: a stored version survives a power failure
    host: str | None = (
        None  # of the learner's machine, as the generators see it, each machine its own; none: the
    )
    #                              address of its route to queue.address
    bucket_mb: Positive = 64.0  # size of one message of the weight stream
    verify: bool = True  # after every flip, hash the engine's live parameters against the learner's
    deadline_s: Seconds = 120.0  # of one weight transfer
    snapshots: int = (
        2  # copies of its shards that a learner rank keeps; with 1, half the memory, a transfer that takes
    )
    #                     longer than a step is started over, and a generator that always does gets no versions
    fanout: Amount | None = (
        None  # most generators that one feeds with what it takes (0: the learner feeds all); none: by
    )
    #                            predicted time, and those on the learner's own host take directly from it
    silence_s: Seconds = (
        300.0  # a generator that the learner has not heard of for so long is fenced: it must join anew
    )
    delta: Literal["never", "auto", "always"] = (
        "auto"  # send generators what changed since the version that they have, if
    )
    #                                             that is less; auto: over links slower than 1 GB/s. Needs snapshots=2
    delta_share: Positive = (
        0.5  # memory for changes of past versions, which laggards replay: share of a rank's parameters
    )
    network_gb_s: Positive = (
        12.5  # what one rank sends to other machines, by which the tree is chosen: 100 Gbit/s
    )
    local_gb_s: Positive = 9.0  # to ranks of its own machine: shared memory of two CPU cores; NVLink does 100
    hop_ms: Positive = 2.0  # what each generator between the learner and the last one adds, beside its bucket

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 2**20)

    @property
    def stored(self) -> bool:
        """Whether weights travel through a store, not over channels."""
        return self.backend in ("file", "redis")

    def __post_init__(self) -> None:
        check_values("sync", self)
        require(
            self.silence_s >= self.deadline_s,
            "sync.silence_s",
            self.silence_s,
            f"a generator is silent during a transfer, for up to sync.deadline_s={self.deadline_s}",
            "raise sync.silence_s",
        )
        require(
            self.snapshots in (1, 2),
            "sync.snapshots",
            self.snapshots,
            "a learner rank keeps 1 or 2 copies",
            "set sync.snapshots=2, or 1 to save memory",
        )
        require(
            self.delta != "always" or self.snapshots == 2,
            "sync.delta",
            self.delta,
            "two versions are compared, but sync.snapshots=1 keeps one",
            "set sync.snapshots=2 or sync.delta=never",
        )
        require(
            self.fanout is None or self.fanout >= 0,
            "sync.fanout",
            self.fanout,
            "a number of generators, or none",
            "leave it out, or set sync.fanout=0 for no tree",
        )
        check_redis_url("sync.redis_url", self.redis_url)
        for key, value, backend, example in (
            ("folder", self.folder, "file", "/shared/weights"),
            ("redis_url", self.redis_url, "redis", "redis://127.0.0.1:6379/0"),
        ):
            require(
                (value is not None) == (self.backend == backend),
                f"sync.{key}",
                value,
                f"goes with sync.backend={backend}, and only with that",
                f"set sync.backend={backend} sync.{key}={example}",
            )


@dataclass(frozen=True)
class OptimizerConfig:
    lr: Positive = 1e-6
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    warmup_steps: Amount = 10  # linear, from lr / warmup_steps
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up, to the last step
    min_lr_ratio: Share = 0.1  # where linear and cosine end, as a share of lr
    grad_clip: Positive = 1.0  # largest global gradient norm


@dataclass(frozen=True)
class LogprobGateConfig:
    """Engine against learner: log-probs of tokens made by the very weights that the learner has."""

    max: Positive | None = None  # most that one token may differ; none: 0.01 in float32, 10 in bfloat16
    mean: Positive | None = (
        None  # most that tokens may differ on average; none: 0.001 in float32, 0.1 in bfloat16
    )
    probe: bool = (
        True  # after each flip generators draw a few tokens for comparison, whatever is being trained on
    )
    on_mismatch: Literal["stop", "warn"] = "stop"  # warn: log it, and train on

    def __post_init__(self) -> None:
        check_values("learner.logprob_gate", self)

    def bounds(self, dtype: str) -> tuple[float, float]:
        """(of one token, of the mean), resolved for a model of this dtype."""
        largest, mean = (0.01, 0.001) if dtype == "float32" else (10.0, 0.1)
        return self.max or largest, self.mean or mean


@dataclass(frozen=True)
class LearnerConfig:
    processes: Processes = 1  # ranks that `asyncrl train` starts (torchrun does it in a split run)
    backend: Literal["fsdp", "megatron"] = "fsdp"  # megatron: Megatron-core, on GPUs; see docs/megatron.md
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch_tokens: Count = 16384  # most tokens of one forward/backward of one rank
    mini_batches: Count = (
        1  # optimizer steps that the groups of one version are split over (PPO mini-batches)
    )
    epochs: Count = 1  # passes over the groups of one version
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    skip_flat_groups: bool = (
        True  # no forward for groups whose advantages are all 0, wherever their gradient is
    )
    #                                exactly 0 (a version of such groups alone leaves the optimizer alone)
    on_bad_step: Literal["stop", "skip"] = (
        "stop"  # a gradient that is not finite; skip: drop the step's groups
    )
    on_bad_batch: Literal["stop", "skip"] = (
        "stop"  # groups whose log-probs, columns or loss are not finite; skip:
    )
    #                                drop them as not_finite and train on others, as if they had not been there
    activation_checkpointing: Literal["none", "layers"] = (
        "none"  # layers: keep each decoder layer's input alone and
    )
    #                                compute the rest again in the backward pass: less memory, a third more work
    compile: bool = False  # torch.compile each decoder layer
    offload: Literal["none", "optimizer", "disk"] = (
        "none"  # where the optimizer's state waits between steps. optimizer: in host
    )
    #                                memory (GPU); disk: in files of offload_folder
    offload_folder: str | None = None  # of every machine of the learner, best on an NVMe disk of its own
    peak_tflops: Positive | None = (
        None  # of one device, for the share learner/mfu; none: measured at the start
    )
    logprob_gate: LogprobGateConfig = field(default_factory=LogprobGateConfig)
    threads: Threads | None = (
        None  # CPU threads of one process; none: cores shared out over the run's processes
    )
    devices: str | None = None  # CUDA_VISIBLE_DEVICES of the learner pool; none: as the shell has it
    groups_deadline_s: Seconds = 600.0  # longest wait for the next group before the run is called stuck

    def __post_init__(self) -> None:
        check_values("learner", self)
        check_devices("learner.devices", self.devices)
        ranks_on = len(self.devices.split(",")) if self.devices else self.processes
        require(
            self.processes <= ranks_on,
            "learner.processes",
            self.processes,
            f"is more than learner.devices={self.devices} has GPUs, and each process needs one of its own",
            f"set learner.processes={ranks_on}, or name more GPUs",
        )
        require(
            not self.compile or self.parallel.tensor == 1,
            "learner.compile",
            self.compile,
            "does not go with layers whose matrices are shared",
            "leave it out, or set learner.parallel.tensor=1",
        )
        require(
            (self.offload == "disk") == (self.offload_folder is not None),
            "learner.offload_folder",
            self.offload_folder,
            f"goes with learner.offload=disk and no other, and this is {self.offload}",
            "set both, or neither",
        )
        own = {"activation_checkpointing": "none", "compile": False, "offload": "none"}
        for key in (key for key, off in own.items() if getattr(self, key) != off):
            require(
                self.backend == "fsdp",
                f"learner.{key}",
                getattr(self, key),
                f"is not what learner.backend={self.backend} does",
                "leave it out, or set learner.backend=fsdp",
            )


@dataclass(frozen=True)
class CriticConfig:
    """The value model of advantages that need one; safe_rlhf has a second one for the cost, of the same make."""

    path: str | None = None  # folder of the body; none: model.path. The value head starts at 0
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    warmup_versions: Amount = 0  # first versions in which only the critic learns
    clip: Positive | None = (
        0.5  # ε_v: how far a value may move from that at the version's start; none: no clip
    )

    def __post_init__(self) -> None:
        check_values("critic", self)


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen policy of KL terms and implicit rewards."""

    path: str | None = None  # none: model.path
    update_every: Count | None = None  # versions after which it becomes the current policy; none: never

    def __post_init__(self) -> None:
        check_values("reference", self)


@dataclass(frozen=True)
class RewardModelConfig:
    """The implicit process reward model of prime, trained online on the outcomes."""

    path: str | None = None  # none: model.path
    frozen: bool = False  # trained before, and not any more
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        check_values("reward_model", self)
        require(
            self.path is not None or not self.frozen,
            "reward_model.path",
            self.path,
            "names no model that was trained before, and reward_model.frozen=true trains none",
            "set it to the folder of an implicit reward model, or reward_model.frozen=false",
        )


@dataclass(frozen=True)
class TeacherConfig:
    """The policy that `advantage: distill` learns from; the same tokenizer as the policy's."""

    path: str | None = None  # required for distill


@dataclass(frozen=True)
class CheckpointConfig:
    every: Count = 50  # versions between checkpoints; the last version is always saved
    keep: Count = 2  # newest checkpoints that stay on disk
    asynchronous: bool = (
        True  # train on while one is written; costs a copy of masters and moments in CPU memory
    )
    deadline_s: Seconds = 600.0  # longest that anybody waits for one to be written

    def __post_init__(self) -> None:
        check_values("checkpoint", self)


@dataclass(frozen=True)
class LaunchConfig:
    """Only for `asyncrl train`, which starts the other processes."""

    generator_restarts: Amount = 3  # how often a generator that dies is started again, all of them together
    queue_restarts: Amount = 3  # how often a queue that dies is started again, from its journal
    pool_restarts: Amount = (
        3  # how often a process of a pool that dies is started again, all of them together
    )
    learner_restarts: Amount = 3  # how often a learner that dies is started again, from the newest checkpoint
    start_deadline_s: Seconds = 120.0  # until the queue listens
    stop_deadline_s: Seconds = (
        30.0  # for a clean end after Ctrl-C or the last version: longer than one version trains
    )
    quiet: bool = False  # no live table

    def __post_init__(self) -> None:
        check_values("launch", self)


@dataclass(frozen=True)
class SftConfig:
    """Only for `asyncrl sft`: supervised warm-up on the training tasks, whose data must hold a 'target' text."""

    steps: Count = 1000  # most optimizer steps
    batch_size: Count = 256  # examples of one step
    lr: Positive = 1e-3
    warmup_steps: Amount = 30  # linear
    until_accuracy: float | None = None  # stop once the greedy held-out accuracy reaches this
    every: Count = 20  # steps between two looks at the held-out accuracy
    output: str = "runs/sft"  # folder for the Hugging Face model, what model.path of a run then names

    def __post_init__(self) -> None:
        check_values("sft", self)


def _check_truncated(algorithm: AlgorithmConfig, generator: GeneratorConfig) -> None:
    """Samples of a cut support are trained on only if that was asked for, and each token is weighed by π/μ."""
    cuts = {"top_p": generator.top_p < 1, "top_k": generator.top_k > 0, "min_p": generator.min_p > 0}
    for key in (key for key, cut in cuts.items() if cut):
        require(
            algorithm.truncated == "weigh",
            f"generator.{key}",
            getattr(generator, key),
            "cuts tokens off that the learner's policy gives a probability: the samples are not that policy's, and "
            "recorded and recomputed log-probs are of two distributions",
            f"unset it (evaluation.{key} is free), or accept what algorithm.truncated=weigh says",
        )
        require(
            algorithm.weighs_behaviour,
            "algorithm.truncated",
            algorithm.truncated,
            f"needs tokens weighed against what they were drawn from, and loss {algorithm.loss!r} with proximal "
            f"{algorithm.proximal!r} and algorithm.correction.kind=none leaves that out",
            "set algorithm.proximal=frozen algorithm.correction.kind=tis",
        )


def _check_policies(algorithm: AlgorithmConfig, learner: LearnerConfig) -> None:
    """Refuse a loss or correction whose policies are the same by construction: it would do nothing, or all twice."""
    loss, proximal, correction = algorithm.built_in_loss, algorithm.proximal, algorithm.correction
    for key, value in (("kind", correction.kind), ("reject", correction.reject)):
        require(
            value == "none" or proximal != "behaviour",
            f"algorithm.correction.{key}",
            value,
            "weighs the proximal policy against the behaviour, and proximal 'behaviour' makes the two the same",
            "set algorithm.proximal=frozen",
        )
    require(
        correction.kind == "none" or loss not in OWN_WEIGHTS,
        "algorithm.correction.kind",
        correction.kind,
        f"would weigh every token a second time: loss '{loss}' has a weight of its own, algorithm.weight_cap",
        "set algorithm.correction.kind=none",
    )
    require(
        not correction.normalise or proximal != "loglinear" or learner.mini_batches * learner.epochs == 1,
        "algorithm.correction.normalise",
        correction.normalise,
        "divides by a mean over the whole version, in which proximal 'loglinear' moves with every optimizer step",
        "set algorithm.proximal=frozen",
    )
    require(
        loss != "decoupled_ppo" or proximal != "behaviour",
        "algorithm.proximal",
        proximal,
        "makes decoupled_ppo plain ppo, since its weight π_p/μ is then 1",
        "set algorithm.proximal=loglinear, or algorithm.loss=ppo",
    )
    require(
        loss not in ("decoupled_ppo", "kl_cov")
        or proximal != "frozen"
        or learner.mini_batches * learner.epochs > 1,
        "algorithm.proximal",
        proximal,
        f"is the policy itself while a version is one optimizer step: ρ is 1, and {loss} holds nothing back",
        "set learner.mini_batches=4, or algorithm.proximal=loglinear",
    )
    require(
        loss != "sppo" or proximal == "frozen",
        "algorithm.proximal",
        proximal,
        "loss sppo measures how far the policy moves from that at the version's start",
        "set algorithm.proximal=frozen",
    )
    require(
        loss != "sppo" or algorithm.aggregation == "seq-mean-token-sum",
        "algorithm.aggregation",
        algorithm.aggregation,
        "loss sppo is one number per rollout, whose parts are summed over its tokens and averaged over rollouts",
        "set algorithm.aggregation=seq-mean-token-sum",
    )
    advantage = algorithm.built_in_advantage
    require(
        loss != "sppo" or advantage in ("sppo", None),
        "algorithm.advantage",
        advantage,
        "is not what loss sppo pulls the log-ratio to, η(P̂ − ½)",
        "set algorithm.advantage=sppo",
    )
    require(
        advantage != "sppo" or loss in ("sppo", None),
        "algorithm.loss",
        loss,
        "would take the target of advantage sppo, what the log-ratio is pulled to, for an advantage",
        "set algorithm.loss=sppo",
    )


@dataclass(frozen=True)
class Config:
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

    def __post_init__(self) -> None:
        for key, values in (
            ("model", self.model),
            ("teacher", self.teacher),
            ("learner.optimizer", self.learner.optimizer),
            ("critic.optimizer", self.critic.optimizer),
            ("reward_model.optimizer", self.reward_model.optimizer),
        ):
            check_values(key, values)
        check_lora(self.model.lora, self.learner.parallel, self.reference.update_every)
        require(
            self.learner.backend == "fsdp" or self.model.lora.rank == 0,
            "model.lora.rank",
            self.model.lora.rank,
            f"learner.backend={self.learner.backend} trains no adapters",
            "set model.lora.rank=0, or learner.backend=fsdp",
        )
        advantage = self.algorithm.built_in_advantage
        if advantage in GROUP_ADVANTAGES:
            require(
                self.batch.group_size >= 2,
                "batch.group_size",
                self.batch.group_size,
                f"advantage '{advantage}' compares the rollouts of a group and needs at least 2",
                "set batch.group_size=8",
            )
        self._check_evaluation()
        require(
            self.generator.heartbeat_s < self.queue.lease_s,
            "generator.heartbeat_s",
            self.generator.heartbeat_s,
            f"renews leases later than they end, by queue.lease_s={self.queue.lease_s}",
            f"set generator.heartbeat_s={self.queue.lease_s / 10:g} or less",
        )
        require(
            self.algorithm.filter == "none" or self.batch.group_size >= 2,
            "algorithm.filter",
            self.algorithm.filter,
            f"would drop every group: one of batch.group_size={self.batch.group_size} has no spread",
            "set algorithm.filter=none, or batch.group_size=8",
        )
        _check_policies(self.algorithm, self.learner)
        _check_truncated(self.algorithm, self.generator)
        self._check_models()
        self._check_pools()
        require(
            self.learner.mini_batches <= self.batch.groups,
            "learner.mini_batches",
            self.learner.mini_batches,
            f"splits the groups of a version, of which there are batch.groups={self.batch.groups}",
            f"set learner.mini_batches={self.batch.groups} or less",
        )
        require(
            self.algorithm.pass_k is None or self.algorithm.pass_k <= self.batch.group_size,
            "algorithm.pass_k",
            self.algorithm.pass_k,
            f"a group of batch.group_size={self.batch.group_size} rollouts has no best of so many",
            f"set batch.group_size={self.algorithm.pass_k} or more",
        )
        require(
            self.algorithm.shaping.overlong_buffer <= self.generator.max_tokens,
            "algorithm.shaping.overlong_buffer",
            self.algorithm.shaping.overlong_buffer,
            f"is a part of generator.max_tokens={self.generator.max_tokens}",
            f"set algorithm.shaping.overlong_buffer={self.generator.max_tokens // 4}",
        )
        require(
            self.spare_versions >= 0,
            "queue.window",
            self.window,
            f"a window of {self.window} over batches of {self.batch.groups} leaves no room under "
            f"queue.max_staleness={self.queue.max_staleness}: η - ceil((W - 1) / B) is negative",
            f"set queue.window to at most {self.queue.max_staleness * self.batch.groups + 1}",
        )
        least = self.batch.groups + self.window - 1
        require(
            self.depth >= least,
            "queue.depth",
            self.depth,
            f"must hold one batch and the window: batch.groups + window - 1 = {least}",
            f"set queue.depth={least} or more",
        )
        require(
            self.generator.max_tokens < self.generator.max_length,
            "generator.max_tokens",
            self.generator.max_tokens,
            f"must leave room for a prompt under generator.max_length={self.generator.max_length}",
            f"set generator.max_length above {self.generator.max_tokens}",
        )
        require(
            (self.agent.max_tokens or 1) <= self.generator.max_length,
            "agent.max_tokens",
            self.agent.max_tokens,
            f"is more than the engine holds of one sequence, generator.max_length={self.generator.max_length}",
            "set generator.max_length higher, or leave agent.max_tokens out",
        )

    def _check_evaluation(self) -> None:
        """What held-out tasks ask of the engine, and the run of them."""
        for name, chosen in self.evaluation.named_sets.items():
            key = f"evaluation.sets.{name}" if name else "evaluation"
            require(
                chosen.samples <= self.generator.slots,
                f"{key}.samples",
                chosen.samples,
                f"is more than the engine decodes at once, generator.slots={self.generator.slots}",
                f"set {key}.samples={self.generator.slots}, or more slots",
            )
        require(
            self.run.target_accuracy is None
            or not self.evaluation.sets
            or self.evaluation.source is not None,
            "run.target_accuracy",
            self.run.target_accuracy,
            "is of the tasks of evaluation.source, which is not set",
            "set it to the source of one of evaluation.sets",
        )

    def _check_models(self) -> None:
        """What an algorithm asks of the models beside the policy, and of the reward."""
        advantage, cost = self.algorithm.built_in_advantage, self.algorithm.cost_part
        require(
            advantage != "distill" or self.teacher.path is not None,
            "teacher.path",
            self.teacher.path,
            "names the model that advantage 'distill' learns from",
            "set it to a model with the tokenizer of model.path",
        )
        require(
            advantage != "safe_rlhf" or cost in self.reward.weights,
            "reward.weights",
            self.reward.weights,
            f"must say what the cost, the part {cost!r}, counts in the reward: unless told, as much as any other part",
            f"set reward.weights.{cost}=0",
        )
        require(
            not self.greedy_rollout or all(reward.per == "rollout" for reward in self.reward.each),
            "algorithm.advantage",
            advantage,
            "adds a greedy rollout to a group, which would change what a reward of 'per: group' says of the others",
            "set algorithm.advantage=rloo, or per=rollout",
        )
        require(
            self.critic.warmup_versions < self.run.versions,
            "critic.warmup_versions",
            self.critic.warmup_versions,
            f"leaves the policy none of run.versions={self.run.versions} to learn in",
            f"set critic.warmup_versions={self.run.versions // 10}",
        )

    def _check_pools(self) -> None:
        """Nothing on a pool follows the policy; one that learns does so once; reward functions there see what the queue
        carries."""
        pools = self.placement.pools
        require(
            "reference" not in pools or self.reference.update_every is None,
            "reference.update_every",
            self.reference.update_every,
            "makes the reference follow the policy, whose weights a pool does not get",
            "set placement.reference.where=colocated, or leave it out",
        )
        frozen = {"reference", "teacher", REWARDS} | ({"reward_model"} if self.reward_model.frozen else set())
        for name in pools.keys() - frozen:
            require(
                pools[name].processes == 1,
                f"placement.{name}.processes",
                pools[name].processes,
                "are copies of a model, and one that learns is one model",
                f"set placement.{name}.ranks={pools[name].processes}, which share it",
            )
        if REWARDS not in pools:
            return
        for name in self.placement.rewards.functions:
            require(
                name in self.reward.functions,
                "placement.rewards.functions",
                self.placement.rewards.functions,
                f"{name!r} is not one of reward.functions",
                f"name some of {', '.join(self.reward.functions) or 'them, or leave it out'}",
            )
        require(
            not self.greedy_rollout,
            "placement.rewards.where",
            "pool",
            f"advantage {self.algorithm.advantage!r} compares with a greedy rollout, which groups do not carry",
            "set placement.rewards.where=colocated, or algorithm.advantage=rloo",
        )

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
