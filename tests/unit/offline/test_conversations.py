"""Conversations as tokens: the assistant's turns, behind the prompts that a generator gives for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chat_cases import tokenizer
from hypothesis import given
from hypothesis import strategies as st
from template_cases import FAMILIES, cached_family
from transformers import PreTrainedTokenizerFast

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import TaskError
from asyncrl.models.prompts import ImageReader, encode_prompt
from asyncrl.offline.conversations import Conversations, spread_mask
from asyncrl.types import MediaItem, Prompt, Rollout, Shown, Task

TEXTS = st.text(st.sampled_from("the answer is 408,\n"), max_size=20)


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def conversation(*contents: str) -> list[dict[str, Any]]:
    """Turns of the user and the assistant."""
    return [message(("user", "assistant")[at % 2], content) for at, content in enumerate(contents)]


def of(tok: PreTrainedTokenizerFast) -> Conversations:
    return Conversations(tok, ImageReader(ModelConfig("none")), {})


def said(tok: PreTrainedTokenizerFast, rollout: Rollout) -> str:
    return str(tok.decode(rollout.token_ids[rollout.loss_mask == 1]))


def test_the_assistants_turns_are_learned_with_the_tokens_that_end_them() -> None:
    tok = tokenizer("merges")
    system = message("system", "the tool says")
    rollout = of(tok).rollout([system, *conversation("12 and 34", "408", "and 2", "816")])
    assert said(tok, rollout) == "408<|im_end|>816<|im_end|>"
    assert tok.decode(rollout.token_ids[rollout.loss_mask == 0]).count("<|im_start|>assistant\n") == 2
    assert "segment" not in rollout.columns


@given(
    st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3),
    st.sampled_from(["merges", "sentence", "bytes"]),
)
def test_a_turn_stands_behind_the_tokens_of_its_prompt_and_is_encoded_alone(
    turns: list[tuple[str, str]], kind: str
) -> None:
    """Whatever a tokenizer would merge across their border."""
    tok = tokenizer(kind)
    (user, answer), *_ = turns
    rollout = of(tok).rollout(conversation(*(text for turn in turns for text in turn)))
    prompt = encode_prompt(tok, Task(0, conversation(user))).tolist()
    ends = [*tok.encode(f"{answer}<|im_end|>", add_special_tokens=False)]
    assert rollout.token_ids.tolist()[: len(prompt)] == prompt
    assert rollout.loss_mask[: len(prompt) + len(ends)].tolist() == [0] * len(prompt) + [1] * len(ends)
    assert rollout.token_ids.tolist()[len(prompt) : len(prompt) + len(ends)] == ends


def test_a_turn_that_the_template_rewrites_later_makes_a_segment_of_its_own() -> None:
    tok = tokenizer("merges", "thinking")
    rollout = of(tok).rollout(conversation("a", "<think>\nhm\n</think>\n\nb", "c", "d"))
    (first, of_first), (second, of_second) = rollout.segment_tokens()
    assert tok.decode(first[of_first]) == "<think>\nhm\n</think>\n\nb<|im_end|>"
    assert tok.decode(second[of_second]) == "<think>\n\n</think>\n\nd<|im_end|>"
    assert "hm" not in tok.decode(second), "the prompt of the second turn has no thoughts of the first"


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"deepseek_v3"}))
def test_every_family_learns_to_answer_and_to_end(family: str) -> None:
    tok = cached_family(family)
    rollout = of(tok).rollout(conversation("one", "first", "two", "second"))
    learned = said(tok, rollout)
    assert [word in learned for word in ("first", "second", "one", "two")] == [True, True, False, False]
    last = rollout.segment_tokens()[-1][0][-1]
    assert (
        int(last) in {tok.eos_token_id, *tok.all_special_ids}
        or tok.decode([int(last)]) in tok.get_added_vocab()
    )


def test_a_template_whose_prompt_opens_thoughts_that_its_turns_lack_is_refused() -> None:
    """A turn would be learned behind another prompt than the one that asks for it."""
    with pytest.raises(TaskError, match="does not render message 2 behind the prompt of its turn"):
        of(cached_family("deepseek_v3")).rollout(conversation("one", "first"))


def test_only_the_answer_of_a_pair_is_learned() -> None:
    tok = tokenizer("merges")
    assert said(tok, of(tok).rollout(conversation("a", "b", "c", "d"), first=2)) == "d<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (conversation("a"), "has no message of the assistant"),
        ([message("user", "a"), {"role": "assistant"}], "do not go through the chat template"),
    ],
)
def test_messages_that_teach_nothing_are_refused(messages: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(TaskError, match=problem):
        of(tokenizer("merges")).rollout(messages)


def test_no_token_of_an_image_is_learned() -> None:
    item = MediaItem("image", 3, {}, b"d")
    prompt = Prompt(np.array([5, 9, 9, 9, 7, 8]), (Shown(1, item),))
    assert spread_mask(np.array([0, 0, 1, 1], np.int8), prompt).tolist() == [0, 0, 0, 0, 1, 1]
