"""The keys of the sections `tasks` and `evaluation`: where tasks come from, and how the held-out ones are sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.sections.entries import as_section
from asyncrl.config.sections.limits import Amount, Count, NotNegative, check_values
from asyncrl.config.sections.rules import check_name, check_support, require

MAIN = ""
"""The name of the evaluation set that `evaluation.source` makes."""


@dataclass(frozen=True)
class SourceConfig:
    """What `tasks`, `evaluation`, each of `tasks.mixture` and each of `evaluation.sets` can say."""

    # fmt: off
    source: str | None = None  # 'package.module:function', 'file.py:function', a .jsonl or .parquet file, a folder of
    #                            such or one made by save_to_disk, or 'hf:name' of the Hugging Face hub
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the source function; of a folder or
    #                            hf:name: split (train), subset, revision
    prompt_key: str = "prompt"  # the field of a row that holds the prompt; 'a.b' is the field b of the field a
    fields: dict[str, str] = field(default_factory=dict)  # {name in task.data: field of the row};
    #                            none: all fields but the prompt, under their own names
    system: str | None = None  # a system prompt: a text then becomes a message of the user's, as with chat
    chat: bool = False  # put texts through the tokenizer's chat template too, not only prompts that are messages
    # fmt: on


@dataclass(frozen=True)
class MixedSource(SourceConfig):
    """One of `tasks.mixture`."""

    weight: float = 1.0  # its share in the tasks, relative to the others'


@dataclass(frozen=True)
class TasksConfig(SourceConfig):
    # fmt: off
    mixture: dict[str, Any] = field(default_factory=dict)  # several sources in place of `source`: {name: {source: …,
    #                            weight: 1, options, prompt_key, fields, system, chat}}; task.data.mixture is the name
    shuffle: bool = True  # a new order each epoch of a source, fixed by run.seed
    chat_template: str | None = None  # file with a Jinja template for all messages, held-out ones too; none: the
    #                            tokenizer's own
    max_prompt_tokens: Count | None = None  # tasks with a longer prompt are dropped with reason 'too_long', and counted
    #                            as queue/dropped/too_long; none: what leaves no room under generator.max_length
    # fmt: on

    def __post_init__(self) -> None:
        check_values("tasks", self)
        require(
            not self.mixture or self.source is None,
            "tasks.source",
            self.source,
            "stands beside tasks.mixture, which takes its place",
            "make it one of tasks.mixture, or set tasks.source=null",
        )
        for name, mixed in self.sources.items():
            key = f"tasks.mixture.{name}"
            _check_named(key, mixed)
            require(
                0 < mixed.weight < math.inf,
                f"{key}.weight",
                mixed.weight,
                "must be above 0 and finite",
                f"set {key}.weight=1, or take it out",
            )
            check_values(key, mixed)

    @property
    def sources(self) -> dict[str, MixedSource]:
        """`mixture`, checked."""
        return {
            name: as_section(MixedSource, f"tasks.mixture.{name}", entry)
            for name, entry in self.mixture.items()
        }


@dataclass(frozen=True)
class EvaluationSet(SourceConfig):
    """Held-out tasks and how they are sampled: `evaluation` itself, and each of `evaluation.sets`."""

    # fmt: off
    samples: Count = 1  # k: answers of each task; above 1 also pass@k, and maj@k if the reward names answers
    temperature: NotNegative = 0.0  # 0: greedy
    max_tokens: Count | None = None  # of one answer; none: as generator.max_tokens
    top_p: float = 1.0  # the fewest tokens that have this mass
    top_k: Amount = 0  # the likeliest tokens; 0: all
    min_p: float = 0.0  # tokens at least this times as likely as the likeliest
    pass_reward: float = 1.0  # from this reward on an answer counts as right, for pass@k and maj@k
    # fmt: on


@dataclass(frozen=True)
class EvaluationConfig(EvaluationSet):
    # fmt: off
    sets: dict[str, Any] = field(default_factory=dict)  # more held-out tasks, {name: {source: …, and any of the keys
    #                            above}}; their metrics are heldout/<name>/…
    every: Count = 10  # versions between evaluations; the first and the last version are always evaluated
    chunk: Count = 250  # answers of one evaluation lease, those of one task at least
    # fmt: on

    def __post_init__(self) -> None:
        check_values("evaluation", self)
        require(
            MAIN not in self.sets,
            "evaluation.sets",
            MAIN,
            "is no name",
            "give the set one, of letters and digits",
        )
        for name, chosen in self.named_sets.items():
            key = f"evaluation.sets.{name}" if name else "evaluation"
            if name != MAIN:
                check_name(key, name)
            _check_named(key, chosen)
            check_values(key, chosen)
            _check_sampling(key, chosen)

    @property
    def named_sets(self) -> dict[str, EvaluationSet]:
        """All sets, checked; the one of `evaluation.source` is called MAIN and comes first."""
        main: Mapping[str, EvaluationSet] = {} if self.source is None else {MAIN: self}
        return {
            **main,
            **{
                name: as_section(EvaluationSet, f"evaluation.sets.{name}", entry)
                for name, entry in self.sets.items()
            },
        }


def keys_of_messages(tasks: TasksConfig, evaluation: EvaluationConfig) -> Iterator[tuple[str, object]]:
    """(key, value) of what makes messages of texts, for which the tokenizer needs a chat template."""
    sources: dict[str, SourceConfig] = {"tasks": tasks}
    sources |= {f"tasks.mixture.{name}": mixed for name, mixed in tasks.sources.items()}
    for name, chosen in evaluation.named_sets.items():
        sources[f"evaluation.sets.{name}" if name else "evaluation"] = chosen
    for section, source in sources.items():
        if source.chat:
            yield f"{section}.chat", source.chat
        if source.system is not None:
            yield f"{section}.system", source.system


def _check_named(key: str, chosen: SourceConfig) -> None:
    require(
        bool(chosen.source),
        f"{key}.source",
        chosen.source,
        "names no tasks",
        f"set {key}.source as tasks.source is set",
    )


def _check_sampling(key: str, chosen: EvaluationSet) -> None:
    require(
        chosen.temperature >= 0,
        f"{key}.temperature",
        chosen.temperature,
        "cannot be negative",
        f"set {key}.temperature=0 for greedy answers",
    )
    require(
        chosen.samples == 1 or chosen.temperature > 0,
        f"{key}.samples",
        chosen.samples,
        "answers of a task are all the same while they are greedy",
        f"set {key}.temperature=1, or {key}.samples=1",
    )
    check_support(key, chosen.top_p, chosen.top_k, chosen.min_p)
