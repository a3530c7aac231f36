"""Messages to tokens. Tokens in a rollout never change.

    open    [system, user] ──────────────▸ the prompt, up to the beginning of the assistant's turn
            the engine ──────────────────▸ the policy's tokens, never decoded and encoded again
    after   [tool, …] or [user, …] ──────▸ the template's glue, the new messages, up to the beginning of the next turn

The glue comes from a dummy conversation: the template renders [user, assistant, the new messages], and the text behind
the assistant's content is used, without the token that ends a turn, which the policy has sampled itself.

Some templates rewrite earlier turns: Qwen3 removes their thoughts (`Chat.rewrites`). `agent.history_thoughts` decides
whether they do in a rollout (`history.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.generator.engines.stop_texts import StopTexts
from asyncrl.types import Array

if TYPE_CHECKING:  # takes a second, and the processes of environments need no tokenizer
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""{"role": …, "content": …}; a tool's answer also has name and tool_call_id."""

MARK = "1234567890123"
"""The dummy's content. Digits: no tokenizer and no template changes them."""

THOUGHT = "9876543210987"
USER: Message = {"role": "user", "content": "0"}
PLAIN: Message = {"role": "assistant", "content": MARK}
DUMMY_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "tool", "arguments": {}},
}


class ControlTokens:
    """The control tokens of a tokenizer, where a text spells them out."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # Tokens of one letter, which toy tokenizers have, cannot be distinguished from text.
        longer = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longer))) if longer else None

    def at_start(self, text: str) -> str | None:
        """The control token with which a text begins."""
        found = self._any.match(text) if self._any else None
        return found[0] if found else None

    def removed(self, text: str) -> str:
        """The text without them."""
        return self._any.sub("", text) if self._any else text

    def broken_up(self, value: Any) -> Any:
        """Messages, or a schema, whose texts have a space inside of each of them: such texts are no control tokens."""
        if isinstance(value, str) and self._any:
            return self._any.sub(lambda m: f"{m[0][0]} {m[0][1:]}", value)
        if isinstance(value, Mapping):
            return {self.broken_up(name): self.broken_up(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken_up(one) for one in value]
        return value


class Chat:
    """The chat template of one tokenizer, with values of its variables. Raises ConfigError if it has none."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "model.path",
                tokenizer.name_or_path,
                "its tokenizer has no chat template, which rollouts of several turns need",
                "use an instruction-tuned model, or set tasks.chat_template=FILE",
            )
        self.tokenizer, self._variables = tokenizer, variables or {}
        added = tokenizer.added_tokens_decoder.values()
        self._special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        self.control = ControlTokens(self._special)

    @property
    def rewrites(self) -> bool:
        """Whether the template would remove thoughts from earlier turns."""
        thinking = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{MARK}"}
        return THOUGHT not in self._render([USER, thinking, USER], opened=True)

    @property
    def opening(self) -> str:
        """The text that the template writes before an assistant's turn."""
        return self._render([USER], opened=True).removeprefix(self._render([USER], opened=False))

    def turn_with_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The template's text of a turn with this call, between `opening` and the token that ends the turn; empty if it
        has no place for calls."""
        calling = {"role": "assistant", "content": "", "tool_calls": [self.call(name, arguments)]}
        with suppress(jinja2.TemplateError, TypeError):
            whole, before = (self._render(messages, opened=False) for messages in ([USER, calling], [USER]))
            turn = whole.removeprefix(before).removeprefix(self.opening).rstrip()
            return turn.removesuffix(next(filter(turn.endswith, sorted(self._special)), ""))
        return ""

    def call(self, name: str, arguments: Mapping[str, Any], number: str = "call00000") -> dict[str, Any]:
        """A call in a message of the policy, in the form that the template takes. number: its id"""
        written = json.dumps(arguments) if self._arguments_are_text else dict(arguments)
        return {**DUMMY_CALL, "id": number, "function": {"name": name, "arguments": written}}

    @cached_property
    def _arguments_are_text(self) -> bool:
        """Whether the template takes the arguments of a call as JSON alone."""
        try:
            self._render([USER, {**PLAIN, "tool_calls": [DUMMY_CALL]}], opened=False)
        except (jinja2.TemplateError, TypeError):
            return True
        return False

    @property
    def turn_with_thoughts(self) -> str:
        """The template's text of a turn with thoughts, behind `opening`; empty if it has no field for them."""
        whole = self._render([USER, {**PLAIN, **thought_fields(THOUGHT)}], opened=False)
        before = self._render([USER], opened=True)
        return whole[shared_length(whole, before) :] if THOUGHT in whole else ""

    def shows(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a prompt mentions these tools."""
        return self._render([USER], opened=True, tools=tools) != self._render([USER], opened=True)

    def check_role(self, role: str) -> None:
        """Raises ConfigError unless the template renders messages of this role after an assistant's turn."""
        try:
            suffix, _ = self._behind([{**tool_message(THOUGHT, role), "name": "tool"}])
        except jinja2.TemplateError as error:
            why = f": {error}"
        else:
            if THOUGHT in suffix:
                return
            why = ""
        raise ConfigError(
            "agent.tool_role",
            role,
            f"the chat template has no place for such messages{why}",
            "set agent.tool_role=user",
        )

    def open(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Array:
        """[P] int64: the prompt of the first turn. Control tokens in the tools are broken up: servers of others write
        them."""
        return self._encode(
            self._render(messages, opened=True, tools=[self.control.broken_up(tool) for tool in tools])
        )

    def open_again(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Array:
        """[P] int64: the prompt of a later turn that begins with these messages. Control tokens in them are broken up,
        as in `after`."""
        return self.open(self.control.broken_up(messages), tools)

    def split_end(self, words: Array, stop: tuple[str, ...]) -> tuple[Array, int | None]:
        """(tokens, end): the tokens of a turn without the one that ended it, and that one; all of them and None if a
        text of `stop` ended it."""
        if stop and StopTexts(stop, self.plain_text_of).length(words) is not None:
            return words, None
        return words[:-1], int(words[-1])

    def after(self, messages: Sequence[Message], end: int | None) -> Array:
        """[G] int64: the tokens between a turn and the next one. end: the token that ended the turn; None: none did.

        Control tokens that a message's text spells out are broken up, so that no tool can forge a turn.
        """
        suffix, closing = self._behind(self.control.broken_up(messages))
        stop = 0 if end is None else self._end_of_turn(suffix, closing, str(self.tokenizer.decode([end])))
        # In context: some tokenizers encode the beginning of a text differently.
        head, whole = self._encode(MARK + suffix[:stop]), self._encode(MARK + suffix)
        if np.array_equal(whole[: len(head)], head):
            return whole[len(head) :]
        return self._encode(suffix[stop:])

    def text_of(self, ids: Array) -> str:
        """The text of a turn's tokens, control tokens spelled out."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def plain_text_of(self, ids: Array) -> str:
        """The text of tokens, without control tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _behind(self, messages: Sequence[Message]) -> tuple[str, str]:
        """(suffix, closing): the template's text behind an assistant's content if these messages follow it, and if
        none does."""
        alone = self._render([USER, PLAIN], opened=False)
        closing = alone[alone.index(MARK) + len(MARK) :]
        try:
            whole = self._render([USER, PLAIN, *messages], opened=True)
        except jinja2.TemplateError:  # answers of tools must follow a call
            called = [_dummy_call(message) for message in messages if "tool_call_id" in message]
            calling: Message = {**PLAIN, "tool_calls": called or [DUMMY_CALL]}
            before = self._render([USER, calling], opened=False)
            whole = self._render([USER, calling, *messages], opened=True)
            return closing + whole.removeprefix(before), closing
        return whole[whole.index(MARK) + len(MARK) :], closing

    def _end_of_turn(self, suffix: str, closing: str, sampled: str) -> int:
        """The index in `suffix` behind the token that ends the turn; 0 if the template has none."""
        tokens, shared = {*self._special, sampled}, suffix[: shared_length(suffix, closing)]
        if ends := [(shared.find(token), len(token)) for token in tokens if token and token in shared]:
            return sum(min(ends))
        first = self.control.at_start(suffix)
        # The model may begin the next message itself (GLM), or a last turn may end by another token (gpt-oss).
        if first and (first == sampled or self.control.at_start(closing)):
            return len(first)
        return 0

    def _render(
        self, messages: Sequence[Message], *, opened: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """opened: up to the beginning of an assistant's turn. Raises ValueError for a part that is no text or image."""
        for message in messages:
            parts = message["content"] if isinstance(message.get("content"), list) else ()
            if other := [part.get("type") for part in parts if "text" not in part and "image" not in part]:
                raise ValueError(
                    f"a message has a part of type {other[0]!r}: rollouts of several turns read text and images"
                )
        return str(
            self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=opened,
                tokenize=False,
                **self._variables,
            )
        )

    def _encode(self, text: str) -> Array:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int64)


def thought_fields(text: str) -> dict[str, str]:
    """The fields of a message that hold thoughts: templates differ in the name."""
    return {"reasoning_content": text, "thinking": text} if text else {}


def tool_message(content: str, role: str = "tool", name: str = "tool", number: int = 0) -> dict[str, Any]:
    """A tool's answer. number: of the call in its rollout; the id has nine letters, as Mistral's template requires."""
    return {"role": role, "content": content, "name": name, "tool_call_id": f"call{number:05d}"}


def _dummy_call(answer: Message) -> dict[str, Any]:
    """A call that this message answers."""
    function = {"name": answer.get("name", "tool"), "arguments": {}}
    return {**DUMMY_CALL, "id": answer["tool_call_id"], "function": function}


def shared_length(one: str, other: str) -> int:
    """Characters of the beginning that two texts have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
