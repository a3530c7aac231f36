"""Earlier turns before the next one: `agent.history` and `agent.history_thoughts`.

keep          the tokens as they were sampled; the answers go on behind them          (`KeptHistory`)
as_template   the template's own rendering of the whole conversation, which begins a
              segment where it does not continue the tokens that were read            (`RenderedHistory`)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
import numpy as np

from asyncrl.config.rules import require
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.chat import THOUGHT, Chat, Message, thought_fields
from asyncrl.generator.agents.env import Observation
from asyncrl.generator.agents.tool_formats import AnyCall, ToolCall, thoughts_and_text
from asyncrl.generator.agents.trajectory import Trajectory
from asyncrl.generator.agents.trajectory_entries import ContextEntry, TrajectoryEntry
from asyncrl.models.prompts import images_in


@dataclass(frozen=True, slots=True)
class SpokenTurn:
    """A turn of the policy: its text, the calls in it, and the token that ended it (None: none did)."""

    text: str
    calls: Sequence[AnyCall]
    end: int | None


class KeptHistory:
    """`agent.history_thoughts=keep`: earlier turns stay as they were sampled. turns: `agent.history`"""

    def __init__(self, chat: Chat, turns: int | None) -> None:
        self._chat, self._turns = chat, turns

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> ContextEntry:
        """The prompt of the first turn."""
        return ContextEntry(self._chat.open(messages, tools), 0)

    def answer(
        self,
        trajectory: Trajectory,
        turn: SpokenTurn,
        observed: Observation,
        tools: Sequence[Mapping[str, Any]],
    ) -> ContextEntry:
        """The tokens that the environment's answer to the last turn adds, with one for each picture. Up to `turns`
        turns behind a prompt continue its segment; each later one begins a segment."""
        if observed.prompt is None:
            earlier = trajectory.turns_since_prompt
            recalled = self._turns if self._turns is not None and earlier > self._turns else None
            return ContextEntry(self._chat.after(observed.messages, turn.end), 0, recalled=recalled)
        if observed.messages:
            raise ValueError("its observation has messages and a whole prompt, which stands in place of them")
        return ContextEntry(self._chat.open_again(observed.prompt, tools), 0, recalled=0)


class RenderedHistory(KeptHistory):
    """`agent.history_thoughts=as_template`: each prompt is the template's rendering of the conversation, as a server
    renders it for the messages of a client. The messages of an entry are JSON of [turn, answers] or [null, prompt].

    marks: texts that open a call
    """

    def __init__(self, chat: Chat, turns: int | None, marks: Sequence[str]) -> None:
        super().__init__(chat, turns)
        self._marks = marks
        # A template without a field for thoughts removes them itself, or takes them for text.
        self._separated = bool(chat.turn_with_thoughts) or chat.rewrites
        self._opened = opened_thoughts(chat)

    def check(self) -> None:
        """Raises ConfigError if the thoughts that the template writes are not read as thoughts."""
        written = self._chat.turn_with_thoughts
        if THOUGHT in self._message(SpokenTurn(written, (), None), ())["content"]:
            raise ConfigError(
                "agent.history_thoughts",
                "as_template",
                f"reads thoughts in <think> or in channels, and the chat template writes {written!r}",
                "set agent.history_thoughts=keep",
            )

    def begin(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> ContextEntry:
        return replace(
            super().begin(_text_alone(messages), tools), messages=json.dumps([None, list(messages)])
        )

    def answer(
        self,
        trajectory: Trajectory,
        turn: SpokenTurn,
        observed: Observation,
        tools: Sequence[Mapping[str, Any]],
    ) -> ContextEntry:
        _text_alone([*(observed.prompt or ()), *observed.messages])
        if observed.prompt is not None:
            entry = super().answer(trajectory, turn, observed, tools)
            return replace(entry, messages=json.dumps([None, self._chat.control.broken_up(observed.prompt)]))
        answers, read = self._chat.control.broken_up(observed.messages), trajectory.context
        message = self._message(turn, answers)
        entry = ContextEntry(read, 0, messages=json.dumps([message, answers]))
        try:
            whole = self._chat.open(self._conversation([*trajectory.entries, entry]), tools)
        except (jinja2.TemplateError, TypeError):  # e.g. at the answer to a call that could not be read
            return replace(entry, ids=self._chat.after(observed.messages, turn.end))
        if np.array_equal(whole[: len(read)], read):
            return replace(entry, ids=whole[len(read) :])
        return replace(entry, ids=whole, recalled=0)

    def _conversation(self, entries: Sequence[TrajectoryEntry]) -> list[Message]:
        """The last prompt, and the last turns behind it with the answers to them."""
        prompt: list[Message] = []
        exchanges: list[list[Message]] = []
        for entry in entries:
            if isinstance(entry, ContextEntry):
                turn, messages = json.loads(entry.messages)
                if turn is None:
                    prompt, exchanges = messages, []
                else:
                    exchanges.append([turn, *messages])
        latest = exchanges if self._turns is None else exchanges[-self._turns :]
        return [*prompt, *(message for exchange in latest for message in exchange)]

    def _message(self, turn: SpokenTurn, answers: Sequence[Message]) -> Message:
        """The turn as a server gives it to a client: calls that cannot all be read are text."""
        calls = [call for call in turn.calls if isinstance(call, ToolCall)]
        readable = bool(calls) and len(calls) == len(turn.calls)
        thoughts, text = thoughts_and_text(self._opened + turn.text, self._marks if readable else None)
        if self._separated:
            own = thoughts.strip().removeprefix("<think>").removesuffix("</think>").strip("\n")
            text, more = (
                text.lstrip("\n") if thoughts else text,
                thought_fields(self._chat.control.removed(own)),
            )
        else:
            text, more = thoughts.removeprefix(self._opened) + text, {}
        message: dict[str, Any] = {"role": "assistant", "content": self._chat.control.removed(text), **more}
        if readable:
            ids = [answer["tool_call_id"] for answer in answers if "tool_call_id" in answer]
            ids += [f"call{number:05d}" for number in range(len(ids), len(calls))]
            pairs = zip(calls, ids, strict=False)
            message["tool_calls"] = [self._chat.call(call.name, call.arguments, made) for call, made in pairs]
        return dict(self._chat.control.broken_up(message))


def opened_thoughts(chat: Chat) -> str:
    """The tag that stands before each turn where the chat template opens the thoughts, else nothing."""
    return "<think>" if chat.opening.rstrip().endswith("<think>") else ""


def _text_alone(messages: Sequence[Message]) -> Sequence[Message]:
    """The same messages. Raises ConfigError if they show pictures."""
    require(
        not images_in(messages),
        "agent.history_thoughts",
        "as_template",
        "renders text alone, and the environment shows pictures",
        "set agent.history_thoughts=keep",
    )
    return messages
