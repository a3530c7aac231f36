"""The section `generator`, with those of the engines inside it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from asyncrl.config.rules import (
    Amount,
    Count,
    NotNegative,
    Positive,
    Processes,
    Rule,
    Seconds,
    Section,
    Threads,
    as_section,
    device_rules,
    key,
    require,
    sampling_rules,
)
from asyncrl.errors import ConfigError, raise_all

GENERATORS = "placement.generators"
"""The key of pools of generators beside the one that `generator` itself describes."""

KvAtFlip = Literal["keep", "recompute", "drain"]


SET_BY: Mapping[str, str] = {
    "model": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "generator.vllm.dtype",
    "max_model_len": "generator.max_length",
    "max_num_seqs": "generator.slots",
    "tensor_parallel_size": "generator.vllm.tensor_parallel",
    "data_parallel_size": "generator.vllm.data_parallel",
    "gpu_memory_utilization": "generator.vllm.gpu_memory_share",
    "kv_cache_memory_bytes": "generator.vllm.kv_cache_mb",
    "enforce_eager": "generator.vllm.enforce_eager",
    "quantization": "generator.quantization",
}
"""Arguments of vLLM's AsyncEngineArgs → the keys that set them."""

NOT_FOR_VLLM: Mapping[str, str] = {
    "logprobs_mode": "log-probs must be those of the distribution that is drawn from",
    "generation_config": "the defaults of the model's own sampling would change what is drawn",
    "worker_extension_cls": "new weights come in by asyncrl's own extension",
    "skip_tokenizer_init": "prompts and answers are token ids",
    "enable_sleep_mode": "placement.colocate=true sets it",
    "cpu_offload_gb": "an update of weights that lie in the host's memory was never tried",
    "pipeline_parallel_size": "an update of stages was never tried: vLLM's CPU build fails at the first sample",
    "enable_expert_parallel": "an update of experts that ranks share out was never tried: vLLM's CPU build fails there",
}
"""Arguments that cannot be set, and why."""


@dataclass(frozen=True)
class VllmConfig(Section):
    """Only for generator.engine=vllm; what is not here is set by `extra`."""

    tensor_parallel: Processes = key(1, "ranks that one generator's model is split over")
    data_parallel: Processes = key(
        1,
        "replicas of the model in one generator, which vLLM spreads its samples over; each has tensor_parallel ranks",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None, "of the model there; none: model.dtype"
    )
    kv_cache_mb: Count | None = key(
        None, "KV cache of one rank; none: gpu_memory_share, on a CPU what all slots may need"
    )
    gpu_memory_share: Positive = key(0.9, "of each GPU, for weights and KV cache together")
    enforce_eager: bool = key(False, "no CUDA graphs; never any on a CPU")
    extra: dict[str, Any] = key({}, "further arguments of vllm.AsyncEngineArgs")

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.gpu_memory_share <= 1,
            "gpu_memory_share",
            "is a share of the memory",
            "set generator.vllm.gpu_memory_share=0.9",
        )
        for name, value in self.extra.items():
            at_key, why = f"extra.{name}", NOT_FOR_VLLM.get(name)
            yield Rule(why is None, at_key, f"cannot be set: {why}", "leave it out", value)
            own = SET_BY.get(name)
            yield Rule(own is None, at_key, f"is set by {own}", f"leave it out, and set {own}", value)
            yield Rule(
                not name.startswith("data_parallel_") or name in SET_BY,
                at_key,
                "cannot be set: all replicas of a generator are on its machine, and vLLM balances them",
                "leave it out; generator.vllm.data_parallel has the number of replicas",
                value,
            )


@dataclass(frozen=True)
class ServerConfig(Section):
    """Only for generator.engine=vllm_server and sglang: servers that run already; see docs/engines.md."""

    urls: list[str] = key([], "http://host:port; generator-k alone uses and updates the k-th")
    folder: str | None = key(
        None,
        "engine sglang, and adapters for vllm_server: where generators write versions; each server must see its own's",
    )
    key_variable: str | None = key(None, "environment variable with the servers' API key")
    deadline_s: Seconds = key(300.0, "a server that does not answer for so long ends its generator")

    def rules(self, at: str) -> Iterator[Rule]:
        for url in self.urls:
            yield Rule(
                url.startswith(("http://", "https://")),
                "urls",
                "is no address of an HTTP server",
                "set generator.server.urls=[http://127.0.0.1:8000]",
                url,
            )
        yield Rule(
            len(set(self.urls)) == len(self.urls),
            "urls",
            "names a server twice, but each generator updates the weights of its own",
            "start a server for each generator",
        )


@dataclass(frozen=True)
class SpeculationConfig(Section):
    """Only for generator.engine=transformers; see docs/engines.md."""

    tokens: Amount = key(
        0,
        "draft up to so many tokens of a sample from other answers to its prompt, and check them in one step; 0: none",
    )
    ridge_tokens: Count = key(
        16,
        "a decode step of so many tokens takes twice as long as one of a single token; nothing is drafted while more "
        "samples are under way, as there are with many slots until the tail of a batch",
    )

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(self.tokens <= 64, "tokens", "is at most 64", "set generator.speculation.tokens=16")


@dataclass(frozen=True)
class GeneratorConfig(Section):
    engine: Literal["transformers", "vllm", "vllm_server", "sglang", "scripted"] = "transformers"
    own_engine: str | None = key(None, "in place of engine, see docs/engines.md")
    count: Processes = key(
        1, "generator processes that `asyncrl train` starts; of other kinds: placement.generators"
    )
    slots: Count = key(256, "sequences decoded at once (rows of the static KV cache)")
    max_length: Count = key(1024, "prompt + output tokens of one sequence (columns of the static KV cache)")
    max_tokens: Count = key(256, "output tokens of one turn")
    temperature: Positive = 1.0
    top_p: float = key(
        1.0, "draw from the fewest tokens that have this mass; below 1 see algorithm.truncated"
    )
    top_k: Amount = key(
        0, "draw from so many of the likeliest tokens; 0: all; above 0 see algorithm.truncated"
    )
    min_p: float = key(
        0.0, "draw from tokens at least so likely, as a share of the likeliest; see algorithm.truncated"
    )
    stop: list[str] = key([], "texts that end a turn, which then ends with the text; see docs/sampling.md")
    on_failure: Literal["retry", "drop", "stop"] = key(
        "retry",
        "of the engine at one request: retry twice and then drop the task with reason 'engine', drop it at "
        "once, or end the generator",
    )
    fixed_shape: bool | None = key(
        None,
        "always decode all slots at full length, so that a row never depends on its neighbours "
        "(bit-reproducible, slower); none: only at max_staleness 0",
    )
    threads: Threads | None = key(
        None, "CPU threads of one process; none: cores shared out over the run's processes"
    )
    devices: str | None = key(None, "CUDA_VISIBLE_DEVICES of the generator pool; none: as the shell has it")
    kv: KvAtFlip = key(
        "keep",
        "samples in flight when new weights come: go on with the KV cache of the old ones, have it made again "
        "by the new ones, or are finished first by the old ones",
    )
    progress_tokens: Amount = key(
        2048,
        "each time an answer has so many more tokens, the queue gets what there is of it, and whoever gets its task "
        "next goes on from there; 0: never",
    )
    progress_deadline_s: Seconds = key(
        300.0,
        "an engine that has samples, and makes no token for so long, ends its generator; so does code that blocks the "
        "event loop",
    )
    drain_deadline_s: Seconds = key(
        600.0, "kv=drain: samples that still run so long after new weights came go on as with kv=recompute"
    )
    quantization: Literal["int8", "fp8"] | None = key(
        None,
        "the learner sends projections in 8 bits, a scale for each row, and generators draw with those; needs "
        "a loss that weighs tokens by π/μ; see docs/quantization.md",
    )
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    heartbeat_s: Seconds = key(2.0, "between two renewals of all leases of a worker")
    grace_s: NotNegative = key(
        0.0,
        "after SIGTERM a generator takes no more tasks, and has so long to finish those it has; what is made of the "
        "others by then goes to the queue, and whoever gets them next goes on from there",
    )

    def rules(self, at: str) -> Iterator[Rule]:
        yield from device_rules(at, self.devices)
        yield from sampling_rules(at, self.top_p, self.min_p, self.stop)
        yield Rule(
            self.kv == "keep" or self.engine != "scripted",
            "kv",
            "is not for generator.engine=scripted: it has no cache, and flips at once",
            "set generator.kv=keep",
        )
        yield Rule(
            not self.speculation.tokens or self.embedded,
            "speculation.tokens",
            "is of generator.engine=transformers",
            "leave it out; vLLM on a GPU has generator.vllm.extra.speculative_config",
        )
        yield from self._server_rules()

    @property
    def embedded(self) -> bool:
        """Whether generators run this project's own engine."""
        return self.own_engine is None and self.engine == "transformers"

    @property
    def engine_in_use(self) -> str:
        return self.own_engine or self.engine

    @property
    def on_vllm(self) -> bool:
        """Whether generators run vLLM themselves."""
        return self.own_engine is None and self.engine == "vllm"

    @property
    def ranks(self) -> int:
        """Ranks of one generator, all its replicas together, each with a device of its own."""
        return self.vllm.tensor_parallel * self.vllm.data_parallel if self.on_vllm else 1

    @property
    def makes_real_tokens(self) -> bool:
        """Whether recorded log-probs are those of a model; scripted ones are made up."""
        return self.own_engine is not None or self.engine != "scripted"

    @property
    def behind_http(self) -> bool:
        """Whether the engine is a server that runs already."""
        return self.engine in ("vllm_server", "sglang")

    def _server_rules(self) -> Iterator[Rule]:
        urls = self.server.urls
        yield Rule(
            bool(urls) == self.behind_http,
            "server.urls",
            "goes with generator.engine=vllm_server or sglang, and only with these",
            "set both, or neither",
        )
        yield Rule(
            not self.behind_http or len(urls) >= self.count,
            "server.urls",
            f"has fewer servers than generator.count={self.count}",
            f"name {self.count} servers, or set generator.count={max(1, len(urls))}",
        )
        yield Rule(
            self.engine == "vllm_server" or (self.server.folder is not None) == (self.engine == "sglang"),
            "server.folder",
            "goes with generator.engine=sglang, and with adapters for vllm_server",
            "set generator.server.folder=/shared/versions",
        )
        yield Rule(
            self.engine != "sglang" or (self.top_p == 1 and self.top_k == 0 and self.min_p == 0),
            "engine",
            "its log-probs are of all tokens, also where top_p, top_k or min_p cut some off",
            "unset these, or set generator.engine=vllm_server",
        )


OF_A_POOL = (
    *("count", "engine", "own_engine", "slots", "threads", "devices", "kv", "on_failure", "grace_s"),
    *("progress_tokens", "progress_deadline_s", "drain_deadline_s", "speculation", "vllm", "server"),
)
"""Keys that a pool of `placement.generators` may have of its own. The others decide which tokens are drawn, or when
leases end, so all generators have them alike."""

NOT_INHERITED = ("count", "devices", "server")
"""Of these, a pool has the defaults unless it names its own: it shares neither GPUs nor servers with another."""


def key_of_pool(name: str) -> str:
    """The key of a pool of generators.

    >>> key_of_pool("small"), key_of_pool("")
    ('placement.generators.small', 'generator')
    """
    return f"{GENERATORS}.{name}" if name else "generator"


def text_of_pool(name: str, text: str) -> str:
    """A text about keys of `generator` that a pool may have, as one about keys of that pool.

    >>> text_of_pool("small", "set generator.slots=8, or generator.max_tokens=4")
    'set placement.generators.small.slots=8, or generator.max_tokens=4'
    """
    return re.sub(rf"(?<![\w.])generator\.(?=({'|'.join(OF_A_POOL)})\b)", f"{key_of_pool(name)}.", text)


@contextmanager
def errors_of_pool(name: str) -> Iterator[None]:
    """Inside, errors about keys of `generator` become errors about those of a pool."""
    try:
        yield
    except ConfigError as error:
        if not name:
            raise
        text = partial(text_of_pool, name)
        raise_all(
            ConfigError(text(one.key), one.value, text(one.rule), text(one.remedy)) for one in error.each
        )


def pool_section(generator: GeneratorConfig, name: str, entry: object) -> GeneratorConfig:
    """The section of a pool of generators. generator: has the values of keys that `entry` lacks, but for those of its
    engine where the pool has another. Raises ConfigError."""
    own, at = entry if isinstance(entry, Mapping) else {}, key_of_pool(name)
    for word, value in own.items():
        alike = word in vars(generator) and word not in OF_A_POOL
        remedy = f"set generator.{word}; a pool may have {', '.join(OF_A_POOL)}"
        require(not alike, f"{at}.{word}", value, "all pools of generators have it alike", remedy)
    another = own.get("engine", generator.engine) != generator.engine or own.get("own_engine") is not None
    apart = {*NOT_INHERITED, *(("speculation",) if another else ())}
    apart |= {"own_engine"} if "engine" in own else set()
    base = {one: value for one, value in dataclasses.asdict(generator).items() if one not in apart}
    with errors_of_pool(name):
        return as_section(GeneratorConfig, at, entry, keys=OF_A_POOL, base=base)


def pool_rules(pools: Mapping[str, GeneratorConfig]) -> Iterator[Rule]:
    """The rules among pools of generators. pools: by name, the one of `generator` itself, '', first"""
    first = pools[""]
    gpus = {name: _names(pool.devices) for name, pool in pools.items()}
    urls = {name: pool.server.urls for name, pool in pools.items()}
    for name, pool in pools.items():
        at = key_of_pool(name)
        yield Rule(
            pool.makes_real_tokens == first.makes_real_tokens,
            f"{at}.engine",
            f"its tokens are {'' if pool.makes_real_tokens else 'not '}those of a model, unlike those of "
            f"generator.engine={first.engine}, and the learner compares all or none",
            "set an engine of the same sort, or leave the pool out",
            pool.engine,
        )
        on_device = pool.makes_real_tokens and not pool.behind_http
        yield Rule(
            not any(gpus.values()) or pool.devices is not None or not on_device,
            f"{at}.devices",
            "is not set, so the pool would use the GPUs that other pools name",
            f"name GPUs of its own, {at}.devices=2,3, or '' for none",
            pool.devices,
        )
        gpu, owner = _taken(name, gpus)
        rule = f"names GPU {gpu}, which the pool {owner} has"
        remedy = "give each pool of generators GPUs of its own"
        yield Rule(not owner, f"{at}.devices", rule, remedy, pool.devices)
        url, owner = _taken(name, urls)
        rule, remedy = f"names {url}, which the pool {owner} updates", "start a server for each generator"
        yield Rule(not owner, f"{at}.server.urls", rule, remedy, pool.server.urls)


def _names(devices: str | None) -> list[str]:
    """GPUs by name, if some are chosen."""
    return [one.strip() for one in (devices or "").split(",") if one.strip()]


def _taken(name: str, values: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """A value of this pool that another one has too, and the key of that; '' twice for none. Nothing of the first pool
    is taken: the others have an error then."""
    others = {value: key_of_pool(other) for other in values if other != name for value in values[other]}
    return next(((value, others[value]) for value in values[name] if name and value in others), ("", ""))


def sharing_rules(generator: GeneratorConfig, devices: str | None, share: float) -> Iterator[Rule]:
    """Each rank of vLLM needs a GPU, and reserves `generator.vllm.gpu_memory_share` of it at the start, whatever else
    runs there. devices, share: the learner's."""
    if not generator.on_vllm or not generator.devices:
        return
    ranks = generator.ranks
    gpus = max(1, len(generator.devices.split(",")) // generator.count)
    yield Rule(
        ranks <= gpus,
        "generator.devices",
        f"leaves one of {generator.count} generators {gpus} GPUs, and each of its {ranks} ranks needs one of its own",
        "name more GPUs, or lower generator.count or generator.vllm.tensor_parallel",
    )
    ours, theirs = (
        {name.strip() for name in (names or "").split(",")} for names in (generator.devices, devices)
    )
    engines = math.ceil(generator.count / len(ours))  # on one GPU
    shared = ours & theirs
    vllm = generator.vllm.gpu_memory_share
    left = round(0.95 / (engines + bool(shared)), 2)
    yield Rule(
        engines * vllm + (share if shared else 0.0) <= 1,
        "generator.vllm.gpu_memory_share",
        f"of {engines} engines on one GPU"
        + (f", beside learner.gpu_memory_share={share:g} of GPU {min(shared)}" if shared else "")
        + ", is more than the GPU has",
        f"set generator.vllm.gpu_memory_share={left:g}"
        + (f" learner.gpu_memory_share={left:g}" if shared else "")
        + ", or give the pools GPUs of their own",
        vllm,
    )
