"""Conversations of several turns as tokens, with a loss on the assistant's turns alone.

Each turn is trained behind the prompt that a generator would give for it:

    prompt of turn k     the template's text of the messages before it, up to the beginning of the assistant's turn
    turn k               what the template adds to that when the turn is there, its end token included

    [user, assistant, user, assistant]
        prompt 1 · turn 1 · glue · turn 2      one segment, where prompt 2 begins with prompt 1 and turn 1
        prompt 1 · turn 1 | prompt 2 · turn 2  two segments, where the template rewrites turn 1 (thoughts, in Qwen3)

Prompts, turns and glue are encoded one by one, as in a rollout, whose turns the policy samples: no token lies across
their border, and none is found again in a text that was encoded as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrl.errors import TaskError
from asyncrl.models.prompts import ImageReader
from asyncrl.types import NO_VERSION, Array, Prompt, Rollout

Message = Mapping[str, Any]
ASSISTANT = "assistant"


@dataclass(slots=True)
class _Segment:
    """text: the template's, as far as it is encoded · messages: in it"""

    text: str = ""
    messages: Sequence[Message] = ()
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], trained: int) -> None:
        self.ids += ids
        self.mask += [trained] * len(ids)


@dataclass(frozen=True, slots=True)
class Conversations:
    """variables: of the chat template, which the tokenizer must have"""

    tokenizer: PreTrainedTokenizerBase
    images: ImageReader
    variables: Mapping[str, Any]

    def rollout(
        self, messages: Sequence[Message], first: int = 0, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Rollout:
        """The assistant's turns are trained, from message `first` on. Raises TaskError for messages without any, that
        the template does not take, or whose turns it renders in another place than behind their prompts."""
        segments: list[_Segment] = []
        for at in range(first, len(messages)):
            if messages[at]["role"] != ASSISTANT:
                continue
            prompt, turn = self._prompt_and_turn(messages[: at + 1], tools)
            if not segments or not prompt.startswith(segments[-1].text):
                segments.append(_Segment())
            segment = segments[-1]
            segment.add(self._encoded(prompt.removeprefix(segment.text)), 0)
            segment.add(self._encoded(turn), 1)
            segment.text, segment.messages = prompt + turn, messages[: at + 1]
        if not segments:
            raise TaskError("has no message of the assistant to learn")
        try:
            return Rollout.from_segments([self._shown(segment) for segment in segments])
        except (ValueError, OSError) as error:
            raise TaskError(str(error)) from error

    def _prompt_and_turn(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, str]:
        """The texts of the last message, the turn up to the token that ends it."""
        prompt = self._rendered(messages[:-1], tools, opened=True)
        whole = self._rendered(messages, tools, opened=False)
        if not whole.startswith(prompt):
            raise TaskError(
                f"the chat template does not render message {len(messages)} behind the prompt of its turn; other "
                "tasks.chat_template_kwargs, or another tasks.chat_template, may"
            )
        turn = whole.removeprefix(prompt)
        ended = turn.rstrip()
        special = [
            *self.tokenizer.all_special_tokens,
            *map(str, self.tokenizer.added_tokens_decoder.values()),
        ]
        # Some templates leave the end to the beginning of the next message (GLM).
        return prompt, ended if ended.endswith(tuple(special)) else f"{turn}{self.tokenizer.eos_token}"

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], opened: bool) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=opened,
                    tokenize=False,
                    **self.variables,
                )
            )
        except Exception as error:  # a template is a program
            why = f"{type(error).__name__}: {error}"
            raise TaskError(f"its messages do not go through the chat template ({why})") from error

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _shown(self, segment: _Segment) -> Rollout:
        ids, mask = np.array(segment.ids, np.int64), np.array(segment.mask, np.int8)
        prompt = self.images.shown_in(ids, segment.messages)
        return trained(prompt, spread_mask(mask, prompt))


def spread_mask(mask: Array, prompt: Prompt) -> Array:
    """The mask of the texts' tokens as one of the prompt's, in which an image's one token has become several, all 0."""
    of_text = np.ones(len(prompt.ids), bool)
    for shown in prompt.media:
        of_text[shown.start + 1 : shown.start + shown.item.tokens] = False
    spread = np.zeros(len(prompt.ids), np.int8)
    spread[of_text] = mask
    return spread


def trained(prompt: Prompt, mask: Array) -> Rollout:
    """A rollout of one segment, whose tokens under the mask are to be learned."""
    return Rollout(
        token_ids=prompt.ids,
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        finish="stop",
        media=prompt.media,
    )
