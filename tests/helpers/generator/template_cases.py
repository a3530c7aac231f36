"""Tokenizers with the chat templates of model families: `tests/data/templates/`."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from chat_cases import tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[2] / "data/templates"
FAMILIES = tuple(sorted(path.stem for path in FOLDER.glob("*.jinja")))
CONTROL = re.compile(r"<[|｜][^|｜<>]+[|｜]>")
MARKUP = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
END = {
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "glm4_5": "<|user|>",
    "gpt_oss": "<|return|>",
    "llama3_1": "<|eot_id|>",
}
"""The token that ends a turn; <|im_end|> elsewhere."""
CLOSED = "</think>\n\n"
SAYING = {"gpt_oss": "<|channel|>final<|message|>", "qwen3_5": CLOSED, "deepseek_v3": CLOSED}
"""What the policy writes before the text of an answer. The prompt may have opened thoughts."""


def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """One token a byte, a control token and a tag of the template's."""
    tok, template = tokenizer("bytes"), (FOLDER / f"{family}.jinja").read_text()
    for found, special in ((CONTROL, True), (MARKUP, False)):
        names = sorted({*found.findall(template), *([END[family]] if special and family in END else [])})
        tok.add_tokens([AddedToken(name, special=special, normalized=False) for name in names])
    tok.chat_template, tok.eos_token = template, END.get(family, "<|im_end|>")
    return tok


cached_family = functools.cache(family_tokenizer)
"""One that no test changes."""
