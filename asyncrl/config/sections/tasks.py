"""The sections `tasks` and `evaluation`: where tasks come from, and how the held-out ones are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.rules import (
    Amount,
    Count,
    NotNegative,
    Rule,
    Section,
    Share,
    as_sections,
    key,
    name_rule,
    sampling_rules,
)

SET_BY_CALLER = (
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "padding", "truncation",
    "continue_final_message", "tokenize", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip

MAIN = ""
"""The name of the evaluation set that `evaluation.source` makes."""


@dataclass(frozen=True)
class SourceConfig(Section):
    """The keys that `tasks`, `evaluation`, each of `tasks.mixture` and each of `evaluation.sets` share."""

    source: str | None = key(
        None,
        "'package.module:function', 'file.py:function', a .jsonl or .parquet file, a folder of such or one "
        "made by save_to_disk, or 'hf:name' of the Hugging Face hub",
    )
    options: dict[str, Any] = key(
        {},
        "keyword arguments of the source function; of a folder or hf:name: split (train), subset, revision",
    )
    prompt_key: str = key(
        "prompt", "the field of a row that holds the prompt; 'a.b' is the field b of the field a"
    )
    fields: dict[str, str] = key(
        {}, "{name in task.data: field of the row}; none: all fields but the prompt, under their own names"
    )
    images_key: str | None = key(
        None, "the field of a row with its images, which stand at each '<image>' of the prompt, or before it"
    )
    system: str | None = key(
        None, "a system prompt: a text then becomes a message of the user's, as with chat"
    )
    chat: bool = key(
        False, "put texts through the tokenizer's chat template too, not only prompts that are messages"
    )

    def source_rule(self, at: str) -> Rule:
        """For entries that users name: each has tasks."""
        remedy = f"set {at}.source as tasks.source is set"
        return Rule(bool(self.source), "source", "names no tasks", remedy)


@dataclass(frozen=True)
class MixedSource(SourceConfig):
    """One of `tasks.mixture`."""

    weight: float = key(1.0, "its share in the tasks, relative to the others'")

    def rules(self, at: str) -> Iterator[Rule]:
        yield self.source_rule(at)
        yield Rule(
            self.weight > 0,
            "weight",
            "must be above 0 and finite",
            f"set {at}.weight=1, or take it out",
        )


@dataclass(frozen=True)
class CurriculumConfig(Section):
    """Which tasks come again, by what they still teach. Epochs after the first leave out tasks that are solved."""

    solved: float | None = key(
        None,
        "a task rests once the mean reward of its last groups is at least this, e.g. 0.9 where rewards are 0 to 1; "
        "none: no curriculum",
    )
    visits: Count = key(1, "groups whose mean that is; a task with fewer does not rest")
    revisit: Share = key(0.1, "share of the resting tasks that come again, drawn anew in each epoch")


@dataclass(frozen=True)
class TasksConfig(SourceConfig):
    mixture: dict[str, Any] = key(
        {},
        "several sources in place of `source`: {name: {source: …, weight: 1, options, prompt_key, fields, "
        "system, chat}}; task.data.mixture is the name",
    )
    shuffle: bool = key(True, "a new order each epoch of a source, fixed by run.seed")
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    chat_template: str | None = key(
        None, "file with a Jinja template for all messages, held-out ones too; none: the tokenizer's own"
    )
    chat_template_kwargs: dict[str, Any] = key(
        {}, "variables of the chat template for all messages, e.g. {enable_thinking: false}"
    )
    max_prompt_tokens: Count | None = key(
        None,
        "tasks with a longer prompt are dropped with reason 'too_long', and counted as "
        "queue/dropped/too_long; none: what leaves no room under generator.max_length",
    )

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            not self.mixture or self.source is None,
            "source",
            "stands beside tasks.mixture, which takes its place",
            "make it one of tasks.mixture, or set tasks.source=null",
        )
        as_sections(MixedSource, "tasks.mixture", self.mixture)  # raises the errors of entries
        yield Rule(
            self.curriculum.solved is None or not self.mixture,
            "curriculum.solved",
            "is of the epochs of one source, and tasks.mixture has several",
            "set tasks.curriculum.solved=null, or tasks.source in the place of the mixture",
        )
        for name, value in self.chat_template_kwargs.items():
            yield Rule(
                name not in SET_BY_CALLER,
                f"chat_template_kwargs.{name}",
                "is an argument of apply_chat_template, and no variable of a template",
                "leave it out",
                value,
            )

    @property
    def sources(self) -> dict[str, MixedSource]:
        """`mixture`, checked."""
        return as_sections(MixedSource, "tasks.mixture", self.mixture)


@dataclass(frozen=True)
class EvaluationSet(SourceConfig):
    """Held-out tasks and how they are sampled: `evaluation` itself, and each of `evaluation.sets`."""

    samples: Count = key(
        1, "k: answers of each task; above 1 also pass@k, and maj@k if the reward names answers"
    )
    temperature: NotNegative = key(0.0, "0: greedy")
    max_tokens: Count | None = key(None, "of one answer; none: as generator.max_tokens")
    top_p: float = key(1.0, "the fewest tokens that have this mass")
    top_k: Amount = key(0, "the likeliest tokens; 0: all")
    min_p: float = key(0.0, "tokens at least this times as likely as the likeliest")
    stop: list[str] | None = key(None, "texts that end a turn; none: as generator.stop")
    pass_reward: float = key(1.0, "from this reward on an answer counts as right, for pass@k and maj@k")

    def rules(self, at: str) -> Iterator[Rule]:
        yield self.source_rule(at)
        yield from self.answer_rules(at)

    def answer_rules(self, at: str) -> Iterator[Rule]:
        """For the way in which held-out tasks are answered."""
        yield Rule(
            self.samples == 1 or self.temperature > 0,
            "samples",
            "answers of a task are all the same while they are greedy",
            f"set {at}.temperature=1, or {at}.samples=1",
        )
        yield from sampling_rules(at, self.top_p, self.min_p, self.stop or ())


@dataclass(frozen=True)
class EvaluationConfig(EvaluationSet):
    sets: dict[str, Any] = key(
        {},
        "more held-out tasks, {name: {source: …, and any of the keys above}}; their metrics are "
        "eval/<name>/…",
    )
    every: Count = key(
        10, "versions between evaluations; the first and the last version are always evaluated"
    )
    chunk: Count = key(250, "answers of one evaluation lease, those of one task at least")

    def rules(self, at: str) -> Iterator[Rule]:
        if self.source is not None:
            yield from super().rules(at)
        remedy = "give the set one, of letters and digits"
        yield Rule(MAIN not in self.sets, "sets", "is no name", remedy, MAIN)
        for name in filter(None, self.sets):
            yield name_rule(f"sets.{name}", name)
        as_sections(EvaluationSet, "evaluation.sets", self.sets)  # raises the errors of entries

    @property
    def named_sets(self) -> dict[str, EvaluationSet]:
        """All sets, checked; the one of `evaluation.source` is called MAIN and comes first."""
        main: dict[str, EvaluationSet] = {} if self.source is None else {MAIN: self}
        return main | as_sections(EvaluationSet, "evaluation.sets", self.sets)


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
        if source.images_key is not None:
            yield f"{section}.images_key", source.images_key
