"""What all processes of a run must have alike: a difference would change what is trained, and nobody would see it.

The learner posts its values on the run's board under AGREED when it opens the streams. Whoever makes tasks, rollouts or
columns compares its own before it leases anything, and ends by ConfigError where they differ. What may rightly differ
from machine to machine (devices, threads, slots, addresses, folders) is not compared, and neither is what only the
learner reads. A function that is given by name compares by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from asyncrl.config.load import all_keys
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.version import VERSION

AGREED = "agreed"
"""Where on the run's board the learner's values are: {key: text}."""

ASYNCRL = "asyncrl"
"""The entry of the package's version, which is no key."""

SECTIONS = (
    "tasks.",
    "evaluation.",
    "reward.",
    "agent.",
    "batch.",
    "critic.",
    "reference.",
    "reward_model.",
    "teacher.",
)
"""Of these all keys, but for LOCAL ones."""

LOCAL = ("reward.workers", "agent.tool_workers")

KEYS = (
    "run.seed",
    "model.path",  # its tokenizer makes the tokens; the weights are the learner's anyway
    "model.dtype",
    "generator.max_length",  # longer tasks are dropped
    "generator.max_tokens",
    "generator.temperature",
    "generator.top_p",
    "generator.top_k",
    "generator.min_p",
    "algorithm.advantage",  # some need a rollout more, and decide what a flat group is
    "algorithm.own_advantage",
    "algorithm.filter",
    "placement.rewards.functions",
)

SHOWN = 200
"""Characters of a value that are posted; what is longer is told apart by a digest."""

REMEDY = (
    "start all processes of a run with the same configuration; where the run goes on with another one on purpose, "
    "begin its queue with `asyncrl queue --anew`"
)


class Board(Protocol):
    """The queue's board, as its clients see it."""

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
    values = {key: text for key, text in flat(config).items() if is_agreed(key)}
    return {ASYNCRL: VERSION, **values}


def flat(config: Config) -> dict[str, str]:
    """Every key of a configuration and its value as one line of JSON, in the order of the schema."""
    return {key: _text(_value(config, key)) for key in all_keys()}


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
    apart = list(differences(learners, agreed(config)))
    if not apart:
        return
    told = "; ".join(f"{key} is {theirs} at the learner and {ours} here" for key, theirs, ours in apart)
    key, _, ours = apart[0]
    raise ConfigError(key, ours, f"this process and the learner are of one run, but {told}", REMEDY)


async def check_board(board: Board, config: Config, wait_s: float) -> None:
    """`check_agreed` with what the learner has posted. Raises DeadlineError if that does not come within wait_s."""
    check_agreed(await board.lookup(AGREED, wait_s), config)


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _text(value: Any) -> str:
    """Alike for equal values, whatever order a mapping was written in."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    if len(text) <= SHOWN:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return f"{text[:SHOWN]}… ({len(text)} characters, digest {digest})"
