"""Messages to tokens, append-only: a token that is in a rollout stays as it is.

    open    [system, user] ──────────────▸ the prompt, up to where the assistant's turn begins
            the engine ──────────────────▸ what the policy said: kept as it came, never decoded and encoded again
    after   [tool, …] or [user, …] ──────▸ the template's glue, the new messages, up to where the next turn begins

The glue is found on a dummy: the template renders [user, assistant, the new messages], and what it puts behind the
words of the assistant is taken. Of that, the token that ends a turn is left out: the policy has said its own.

Some templates rewrite what is past (Qwen3 takes the thoughts out of earlier turns). Here nothing is rewritten: the
policy goes on from exactly the tokens it saw and said, and the learner sees the same. `rewrites` tells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrl.errors import ConfigError
from asyncrl.types import Array

Message = Mapping[str, Any]
"""{"role": …, "content": …}; of a tool's answer also name and tool_call_id."""

MARK = "1234567890123"
"""What the dummy says. Digits: every tokenizer and every template takes them as they are."""

THOUGHT = "9876543210987"
USER: Message = {"role": "user", "content": "0"}
PLAIN: Message = {"role": "assistant", "content": MARK}
DUMMY_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "tool", "arguments": {}},
}
CALLING: Message = {**PLAIN, "tool_calls": [DUMMY_CALL]}


class Chat:
    """The chat template of one tokenizer. Raises ConfigError if it has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "model.path",
                tokenizer.name_or_path,
                "its tokenizer has no chat template, which turns of several need",
                "use an instruction-tuned model, or set tasks.chat_template=FILE",
            )
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self._special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        # A token of one letter cannot be told from text: toy tokenizers have those.
        forged = sorted((token for token in self._special if len(token) > 1), key=len, reverse=True)
        self._forged = re.compile("|".join(map(re.escape, forged))) if forged else None

    @property
    def rewrites(self) -> bool:
        """Whether the template would take thoughts out of earlier turns."""
        thinking = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{MARK}"}
        return THOUGHT not in self._render([USER, thinking, USER], opened=True)

    def shows(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a prompt says anything of these tools."""
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
        """[P] int64: the prompt of the first turn."""
        return self._encode(self._render(messages, opened=True, tools=tools))

    def after(self, messages: Sequence[Message], end: int) -> Array:
        """[G] int64: what follows a turn whose last token is `end`, up to where the next turn begins.

        Control tokens that a message's text spells out are taken apart, so that no tool can forge a turn.
        """
        suffix, kept = self._behind([self._harmless(message) for message in messages])
        cut = self._end_of_turn(suffix[:kept], str(self._tokenizer.decode([end])))
        # In context: some tokenizers encode the beginning of a text in a way of its own.
        head, whole = self._encode(MARK + suffix[:cut]), self._encode(MARK + suffix)
        if np.array_equal(whole[: len(head)], head):
            return whole[len(head) :]
        return self._encode(suffix[cut:])

    def said(self, ids: Array) -> str:
        """The text of a turn's tokens, control tokens spelled out."""
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _behind(self, messages: Sequence[Message]) -> tuple[str, int]:
        """What the template puts behind the assistant's words, and how much of it closes the assistant's turn."""
        alone = self._render([USER, PLAIN], opened=False)
        closing = alone[alone.index(MARK) + len(MARK) :]
        try:
            whole = self._render([USER, PLAIN, *messages], opened=True)
        except jinja2.TemplateError:  # answers of tools must follow a call
            calling = self._render([USER, CALLING], opened=False)
            whole = self._render([USER, CALLING, *messages], opened=True)
            return closing + whole.removeprefix(calling), len(closing)
        suffix = whole[whole.index(MARK) + len(MARK) :]
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(suffix, closing, strict=False))
        return suffix, sum(1 for _ in shared)

    def _end_of_turn(self, closing: str, said: str) -> int:
        """Where in `closing` the token stops that ends a turn; 0 if the template has none."""
        ends = [
            (closing.find(token), len(token))
            for token in {*self._special, said}
            if token and token in closing
        ]
        return sum(min(ends)) if ends else 0

    def _harmless(self, message: Message) -> Message:
        content = message.get("content")
        if self._forged is None or not isinstance(content, str):
            return message
        return {**message, "content": self._forged.sub(lambda m: f"{m[0][0]} {m[0][1:]}", content)}

    def _render(
        self, messages: Sequence[Message], *, opened: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """opened: up to where an assistant's turn begins."""
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=opened,
                tokenize=False,
            )
        )

    def _encode(self, text: str) -> Array:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int64)


def tool_message(content: str, role: str = "tool", name: str = "tool", number: int = 0) -> dict[str, Any]:
    """What a tool answers. number: of the call in its rollout; the id has nine letters, as Mistral's template asks."""
    return {"role": role, "content": content, "name": name, "tool_call_id": f"call{number:05d}"}
