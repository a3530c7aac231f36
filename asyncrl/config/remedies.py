"""Suggestions in place of a key or a value that is refused."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    type(None): "null",
}

MEANT = {
    "device": "leave it out: GPUs are used where torch sees some; devices=… of learner or generator chooses among them",
    "batch_size": "did you mean batch.groups (tasks of a version), batch.group_size (rollouts of a task) or "
    "learner.micro_batch_tokens?",
    "learning_rate": "did you mean learner.optimizer.lr?",
    "max_steps": "did you mean run.versions?",
    "output_dir": "did you mean run.dir?",
    "model_name": "did you mean model.path?",
    "sinks": "did you mean telemetry.trackers?",
}
"""Keys of other trainers and of earlier versions, which no spelling leads to."""

OFF = {
    "evaluation": "evaluation.source=null evaluation.sets=null",
    "agent": "agent.tools=null agent.environment=null agent.program=null agent.function=null",
    "model.lora": "model.lora.rank=0",
    "critic": "an algorithm.advantage that needs no critic, such as grpo",
    "reference": "algorithm.kl_loss.coef=0 algorithm.shaping.kl_coef=0",
    "telemetry": "telemetry.trackers=[] telemetry.rollouts_every=0",
    "placement": "placement.<model>.where=colocated",
}
"""Sections that can be turned off, and by what."""

FIRST = {
    **dict.fromkeys(("model", "critic", "reference", "reward_model", "teacher"), "path"),
    **dict.fromkeys(("tasks", "evaluation"), "source"),
    "reward": "function",
}
"""Sections that are given a word by mistake, and the key that takes it."""


def kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a union is of; of no union itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def in_words(hint: Any) -> str:
    """A description of the values of a type.

    >>> in_words(int), in_words(float | None), in_words(typing.Literal["stop", "skip"])
    ('a whole number', 'a number, or null', 'stop or skip')
    """
    *firsts, last = [
        " or ".join(map(str, typing.get_args(kind)))
        if typing.get_origin(kind) is typing.Literal
        else IN_WORDS.get(typing.get_origin(kind) or kind, "a value of this type")
        for kind in kinds(hint)
    ]
    return f"{', '.join(firsts)}, or {last}" if firsts else last


def for_value(hint: Any, value: object, about: str | None) -> str:
    """The remedy for a value of another type than its key's.

    >>> for_value(typing.Literal["grpo", "gae"], "grpoo", None)
    'did you mean grpo?'
    """
    words = [str(word) for kind in kinds(hint) for word in typing.get_args(kind) if word is not None]
    near = difflib.get_close_matches(str(value).lower(), words, n=1) if isinstance(value, str) else []
    if near:
        return f"did you mean {near[0]}?"
    return f"give {in_words(hint)}" + (f": {about}" if about else "")


def for_unknown(key: str, known: Iterable[str]) -> str:
    """The remedy for a key that does not exist."""
    name = key.rpartition(".")[2]
    if name in MEANT:
        return MEANT[name]
    near = nearest(key, tuple(known))
    return f"did you mean {near}?" if near else "`asyncrl config CONFIG --print` shows every key"


def for_section(section: str, value: object, first_key: str) -> str:
    """The remedy for a section that is given a value."""
    if value is None and section in OFF:
        return f"to turn it off, set {OFF[section]}"
    if value is None:
        return f"leave it out for the defaults; its keys are set one by one, e.g. {first_key}"
    if isinstance(value, str) and section in FIRST:
        return (
            f"write {section}: {{{FIRST[section]}: {value}}}, or {section}.{FIRST[section]}={value} as a word"
        )
    return f"set the keys below it, e.g. {first_key}"


def for_include(name: str, folders: Iterable[Path]) -> str:
    """The remedy for a file that is in none of these folders."""
    known = [
        str(file.relative_to(folder))
        for folder in folders
        for pattern in ("*.yaml", "*/*.yaml")
        for file in folder.glob(pattern)
    ]
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "give a path relative to one of the two"


def nearest(key: str, known: tuple[str, ...]) -> str | None:
    """A key that is nearly spelled so, else the one with the same last name in another section, else the one spelled
    most alike."""
    name = key.rpartition(".")[2]
    nearly = difflib.get_close_matches(key, known, n=1, cutoff=0.95)
    same = [other for other in known if other.rpartition(".")[2] == name]
    spelled = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    names = [other.rpartition(".")[2] for other in known]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    alike = [other for other, last in zip(known, names, strict=True) if close and last == close[0]]
    return next(iter([*nearly, *same, *spelled, *alike]), None)
