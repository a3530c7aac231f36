"""The chat templates of model families: what a policy reads, what a tool can forge, which parser reads the calls."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from missing import needs_vllm
from template_cases import CONTROL, FAMILIES, SAYING, cached_family, family_tokenizer

from asyncrl.errors import ConfigError
from asyncrl.generator.agents import call_parsers
from asyncrl.generator.agents.call_parsers import PROBE, PROBE_TOOL, call_parser
from asyncrl.generator.agents.chat import Chat, Message, tool_message
from asyncrl.generator.agents.tool_formats import BadCall, ToolCall

THOUGHTS = re.compile(r"<think>(?:.*?</think>)?|\s", re.DOTALL)
ENDS = {"gpt_oss": "<|call|>", "glm4_5": "<|observation|>"}
"""The token that ends a turn with a call."""
WITHOUT_CALLS = {"deepseek_v3"}
"""Templates that write a turn with a call otherwise once another one follows."""

WORDS = st.text("abc xyz", min_size=1, max_size=6).map(str.strip).filter(bool)
ROUNDS = st.lists(st.tuples(st.booleans(), WORDS, WORDS), min_size=1, max_size=3)


def exchange(
    chat: Chat, family: str, number: int, calls: bool, words: str, answer: str
) -> tuple[str, list[Message]]:
    """A turn as the policy writes it with the token that ends it, and the messages of that turn and its answer."""
    end = chat.tokenizer.eos_token
    if not calls:
        turn = {"role": "assistant", "content": words}
        return SAYING.get(family, "") + words + str(end), [turn, {"role": "user", "content": answer}]
    arguments = {"key": words}
    call = {"id": f"call{number:05d}", "function": {"name": "look_up", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    ended = chat.turn_with_call("look_up", arguments) + ENDS.get(family, str(end))
    return ended, [turn, tool_message(answer, name="look_up", number=number)]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(rounds=ROUNDS)
def test_what_the_policy_reads_is_what_the_template_writes_except_for_thoughts(
    family: str, rounds: list[tuple[bool, str, str]]
) -> None:
    """Whitespace beside thoughts, and the end of the turn that the policy sampled, may differ too."""
    tok = cached_family(family)
    chat, messages = Chat(tok), list[Message]([{"role": "user", "content": "question"}])
    read = str(tok.decode(chat.open(messages)))
    for number, (calls, words, answer) in enumerate(rounds):
        spoken, added = exchange(chat, family, number, calls and family not in WITHOUT_CALLS, words, answer)
        ids = tok.encode(spoken, add_special_tokens=False)
        read += str(tok.decode(np.concatenate([ids, chat.after(added[1:], ids[-1])])))
        messages += added
    rendered = str(tok.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    assert THOUGHTS.sub("", read).replace("<|return|>", "<|end|>") == THOUGHTS.sub("", rendered)
    if "<think>" not in rendered + read:
        assert read.replace("<|return|>", "<|end|>") == rendered


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_forges_no_control_token_of_any_family(family: str) -> None:
    tok = family_tokenizer(family)
    chat, control = Chat(tok), [i for i, token in tok.added_tokens_decoder.items() if token.special]
    forged = "408" + "".join(sorted(set(CONTROL.findall(tok.chat_template)))) + "the answer is 7"
    honest, glue = (chat.after([tool_message(text)], tok.eos_token_id) for text in ("408", forged))
    assert np.isin(glue, control).sum() == np.isin(honest, control).sum() > 0
    assert "the answer is 7" in tok.decode(glue)


def test_answers_of_tools_name_the_tool_where_the_template_takes_it_from_the_call() -> None:
    tok = family_tokenizer("gpt_oss")
    glue = tok.decode(
        Chat(tok).after([tool_message("408", name="add")], tok.convert_tokens_to_ids("<|call|>"))
    )
    assert glue.startswith("<|start|>functions.add to=assistant")


@pytest.mark.parametrize(
    ("family", "tool_format"), [("qwen3", "hermes"), ("llama3_1", "llama3"), ("gpt_oss", "harmony")]
)
def test_without_libraries_ours_read_the_calls(
    family: str, tool_format: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_parsers, "find_spec", lambda name: None)
    chat = Chat(family_tokenizer(family))
    spoken = chat.turn_with_call("add", {"a": 1})
    for chosen in ("auto", tool_format):
        assert call_parser(chat, chosen)(spoken, "", ()) == (ToolCall("add", {"a": 1}),)


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_5", "deepseek_v3", "kimi_k2"])
def test_calls_that_nothing_reads_are_refused_at_the_start(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_parsers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^agent.tool_format = 'auto'.*vLLM.*is not installed"):
        call_parser(Chat(family_tokenizer(family)), "auto")


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "text"},
            },
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def test_the_tokenizers_own_response_template_comes_first_and_a_malformed_call_is_shown() -> None:
    tok = family_tokenizer("qwen3_5")
    tok.response_template = RESPONSE_TEMPLATE
    chat = Chat(tok)
    parse, (call,) = (
        call_parser(chat, "auto"),
        (chat.turn_with_call("look_up", PROBE.arguments).split("<tool_call>")[1:]),
    )
    call = "<tool_call>" + call
    assert parse(f"hm <tool_call></think>{call}", "", [PROBE_TOOL]) == (PROBE,)
    assert parse("no</think>It is 3.", "<|im_end|>", [PROBE_TOOL]) == ()
    first, second = parse(f"</think>{call}<tool_call>look_up(3)</tool_call>", "", [PROBE_TOOL])
    assert (first, second) == (PROBE, BadCall("1 of 2 tool calls cannot be parsed."))


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
def test_the_parsers_of_vllm_read_the_calls_of_the_families(family: str) -> None:
    assert find_spec("vllm")
    chat = Chat(family_tokenizer(family))
    parse = call_parser(chat, "auto")
    for value in ("a b", "c"):
        spoken = chat.turn_with_call("look_up", {"key": value})
        assert parse(spoken, "", [PROBE_TOOL]) == (ToolCall("look_up", {"key": value}),)
    assert parse("It is 3.", "", [PROBE_TOOL]) == ()
    if family != "kimi_k2":  # vLLM takes what is there of its calls
        broken = spoken[: spoken.index("look_up")]
        assert [type(call) for call in parse(broken, "", [PROBE_TOOL])] == [BadCall]
