"""Tokenizers and chat templates of several kinds, made on the spot.

bytes      one token a byte
merges     byte-level BPE with merges: most texts have more than one tokenization
sentence   BPE behind a Metaspace, as SentencePiece models: a text's first token is one of its own
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|header|>",
    "<|end_header|>",
    "<|eot|>",
    "<|eom|>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]
CORPUS = [
    "user assistant system tool the product of 12 and 34 is 408, the tool says",
    '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>',
    "<think> let me think about the product </think> \n\n the answer is the answer",
] * 4

CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""One user turn for all answers of tools, as Qwen2.5."""

THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1].lstrip() %}
{%- endif %}
{%- if loop.index0 > ns.last %}{%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content %}{%- endif %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Thoughts of the turns before the last user message are taken out, and empty ones put in after it, as Qwen3."""

HEADERS = """\
{{- '<|begin|>' }}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|header|>' + role + '<|end_header|>\\n\\n' + message.content + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end_header|>\\n\\n' }}{%- endif %}"""
"""Text before, no newline after a turn; several end tokens, as Llama 3."""

STRICT = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'tool' %}
{%- if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}
{{- raise_exception('a tool has nothing to answer') }}
{%- endif %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('nine letters, please') }}{%- endif %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}{{- message.content + (message.tool_calls | tojson) + '</s>' }}
{%- else %}{{- ' ' + message.content + '</s>' }}{%- endif %}
{%- endfor %}"""
"""No generation prompt, and a complaint about tools that were not called, as Mistral."""

BARE = """\
{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""
"""No token that ends a turn."""

ENDING = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- else %}{{- '<|eot|>' }}{%- endif %}"""
"""A conversation that stops has one more token, as Phi 3."""

TEMPLATES = {
    "chatml": CHATML,
    "thinking": THINKING,
    "headers": HEADERS,
    "strict": STRICT,
    "bare": BARE,
    "ending": ENDING,
}
END = {"chatml": "<|im_end|>", "thinking": "<|im_end|>", "headers": "<|eot|>", "strict": "</s>"} | {
    "bare": "</s>",
    "ending": "<|im_end|>",
}
KINDS = ("bytes", "merges", "sentence")


def tokenizer(kind: str, template: str | None = "chatml") -> PreTrainedTokenizerFast:
    made = _sentence() if kind == "sentence" else _bytes(300 + 200 * (kind == "merges"))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=END[template or "chatml"],
        additional_special_tokens=CONTROL[:5],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATES[template] if template else None
    return wrapped


def letters(tok: PreTrainedTokenizerFast, text: str) -> list[int]:
    """`text` letter by letter, as a policy may say it and no tokenizer would."""
    if "▁" not in tok.get_vocab():
        return [i for letter in text for i in tok.encode(letter, add_special_tokens=False)]
    known = tok.get_vocab()
    spelled = ["▁" if letter == " " else letter for letter in text]
    pieces = [[s] if s in known else [f"<0x{byte:02X}>" for byte in s.encode()] for s in spelled]
    return [known[piece] for several in pieces for piece in several]


def _bytes(size: int) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    few = size < 400
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(CONTROL) if few else size,
        initial_alphabet=alphabet,
        special_tokens=_control(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def _sentence() -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*_control(), AddedToken("<unk>", special=True), *pieces],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def _control() -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in CONTROL]
