"""The keys that all processes of a run must have alike: a difference would change what is trained, unnoticed.

The learner posts its values in the queue's registry under AGREED when it opens the streams. A process that makes tasks,
rollouts or columns compares its own before it leases anything, and ends by ConfigError where they differ. Keys that may
differ from machine to machine (devices, threads, slots, addresses, folders) are not compared. For a key that only one
side reads, such as `queue.max_staleness`, another process logs a warning where its own value differs; it names the side
whose value counts. A function that is given by name compares by name.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, Protocol

from asyncrl.config import VERSION
from asyncrl.config.load import all_keys
from asyncrl.config.schema import Config
from asyncrl.config.sections.placement import OWN_MODELS
from asyncrl.errors import ConfigError
from asyncrl.masking import masked_value

log = logging.getLogger(__name__)

_warned: set[str] = set()

AGREED = "agreed"
"""The entry of the queue's registry with the learner's values: {key: text}."""

ASYNCRL = "asyncrl"
"""The entry of the package's version, which is no key."""

SECTIONS = (
    "tasks.",
    "evaluation.",
    "reward.",
    "agent.",
    "model.lora.",
    "batch.",
    "critic.",
    "reference.",
    "reward_model.",
    "teacher.",
)
"""All keys of these sections, but for LOCAL ones."""

LOCAL = (
    "model.lora.path",  # the first version brings the adapters
    "reward.workers",
    "reward.max_failed_share",
    "agent.tool_workers",
    "agent.environment_processes",
    "agent.environment_python",
    "agent.gateway.host",
    "agent.gateway.port",
    "agent.gateway.remote",
)

KEYS = (
    "run.seed",
    "model.path",  # its tokenizer makes the tokens; the weights are the learner's anyway
    "model.dtype",
    "model.head_dtype",
    "generator.heartbeat_s",  # leases end after three
    "generator.max_length",  # longer tasks are dropped
    "generator.max_tokens",
    "generator.temperature",
    "generator.top_p",
    "generator.top_k",
    "generator.min_p",
    "generator.quantization",
    "algorithm.advantage",  # some need a rollout more, and decide what a flat group is
    "algorithm.own_advantage",
    "algorithm.teacher_loss.form",  # what a teacher on a pool gives
    "algorithm.teacher_loss.top_k",
    "algorithm.filter",
    "placement.rewards.functions",
)

OF_THE_LEARNER = (
    *(
        "queue.max_staleness",
        "queue.window",
        "queue.depth",
        "queue.wait_share",
        "queue.max_bytes",
        "queue.lease_s",
        "queue.hedge_s",
    ),
    *("run.versions", "run.target_accuracy", "algorithm.", "checkpoint."),
    *("sync.keep", "sync.snapshots", "sync.fanout", "sync.delta", "sync.delta_share"),
    *(
        "learner.backend",
        "learner.own_backend",
        "learner.mini_batches",
        "learner.epochs",
        "learner.optimizer.",
    ),
)
"""Keys whose value at the learner counts. Another process may have another value, and warns that it does nothing."""

OF_THE_QUEUE = ("queue.store", "queue.durable", "queue.fsync", "queue.retained_bytes", "queue.redis_url")
"""Keys whose value at the queue's own process counts."""

ASIDE = "one side: "
"""Before a key of these two among what the learner posts."""

SHOWN = 200
"""Characters of a value that are posted; longer ones differ in their digests."""

REMEDY = (
    "start all processes of a run with the same configuration; where the run goes on with another one on purpose, "
    "begin its queue with `asyncrl queue --anew`"
)


class Registry(Protocol):
    """The queue's registry, as its clients read it."""

    async def lookup(self, key: str, wait_s: float) -> Any: ...


def is_agreed(key: str) -> bool:
    """Whether all processes of a run must have this key alike.

    >>> [is_agreed(key) for key in ("batch.group_size", "generator.slots", "placement.critic.where")]
    [True, False, True]
    """
    of_placement = key.startswith("placement.") and key.endswith(".where")
    return key in KEYS or of_placement or (key.startswith(SECTIONS) and key not in LOCAL)


def agreed(config: Config) -> dict[str, str]:
    """The values to agree on, each as one line of JSON, and the version of the package."""
    values = {key: text for key, text in as_texts(config).items() if is_agreed(key)}
    return {ASYNCRL: VERSION, **values}


def posted(config: Config) -> dict[str, str]:
    """All that the learner posts under AGREED: what must be alike, and what only one side uses."""
    aside = (
        key for key in all_keys() if key.startswith((*OF_THE_LEARNER, *OF_THE_QUEUE)) and not is_agreed(key)
    )
    return {**agreed(config), **{ASIDE + key: _text(attrgetter(key)(config)) for key in aside}}


def one_sided(learners: Mapping[str, str], config: Config, *, queue: bool = False) -> Iterator[str]:
    """A line for each key that has another value here than the learner has posted, where only one of the two counts.

    queue: whether this is the queue's process, whose own value of some keys counts.
    """
    for name, theirs in learners.items():
        key = name.removeprefix(ASIDE)
        if key == name or (ours := _text(attrgetter(key)(config))) == theirs:
            continue
        if not key.startswith(OF_THE_QUEUE):
            yield f"{key} is {theirs} at the learner, whose value counts; {ours} here does nothing"
        elif queue:
            yield f"{key} is {ours} here at the queue, whose value counts; {theirs} at the learner does nothing"


def as_texts(config: Config) -> dict[str, str]:
    """Every key of a configuration and its value as one line of JSON, in the order of the schema. Of `placement.own`,
    the keys of each model that is on a pool."""
    texts, placement = {key: _text(attrgetter(key)(config)) for key in all_keys()}, config.placement
    del texts[OWN_MODELS]
    for name in sorted(placement.own.keys() & placement.pools.keys()):
        for key, value in vars(placement.pools[name]).items():
            texts[f"{placement.key_of(name)}.{key}"] = _text(value)
    return texts


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(key, their value, our value) where two configurations differ; a key that one of them lacks is '(none)' there.

    >>> list(differences({"a": "1", "b": "2"}, {"a": "1", "c": "3"}))
    [('b', '2', '(none)'), ('c', '(none)', '3')]
    """
    for key in dict.fromkeys((*theirs, *ours)):
        pair = theirs.get(key, "(none)"), ours.get(key, "(none)")
        if pair[0] != pair[1]:
            yield key, *pair


def check_agreed(learners: Mapping[str, str], config: Config) -> None:
    """Raises ConfigError, under the first key that differs, with all of them and both values of each.

    learners: what `agreed` made of the learner's configuration.
    """
    must = {key: text for key, text in learners.items() if not key.startswith(ASIDE)}
    apart = list(differences(must, agreed(config)))
    if not apart:
        return
    texts = "; ".join(f"{key} is {theirs} at the learner and {ours} here" for key, theirs, ours in apart)
    key, _, ours = apart[0]
    raise ConfigError(key, ours, f"this process and the learner are of one run, but {texts}", REMEDY)


async def check_with_learner(
    registry: Registry, config: Config, wait_s: float, *, queue: bool = False
) -> None:
    """`check_agreed` with the values that the learner has posted, and a warning of each key in `one_sided`, once.

    Raises ConfigError as `check_agreed`, and DeadlineError if the learner posts nothing within wait_s.
    """
    learners = await registry.lookup(AGREED, wait_s)
    check_agreed(learners, config)
    for line in one_sided(learners, config, queue=queue):
        if line not in _warned:
            _warned.add(line)
            log.warning("%s", line)


def _text(value: Any) -> str:
    """Alike for equal values, whatever order a mapping was written in. Passwords in URLs are masked."""
    text = json.dumps(masked_value(value), sort_keys=True, ensure_ascii=False, default=str)
    if len(text) <= SHOWN:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return f"{text[:SHOWN]}… ({len(text)} characters, digest {digest})"
