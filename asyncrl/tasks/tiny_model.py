"""Models so small that a CPU trains them: a configuration and a tokenizer, made from a few texts. No weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.schema import Config
from asyncrl.generator.agents.env import Action, Environment, load_environment
from asyncrl.generator.agents.tool_formats import ToolFormat, calls_in
from asyncrl.tasks.source import training_tasks
from asyncrl.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")
TEMPLATE = """\
{%- if tools %}{{- '<|tools|>' }}{%- endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}
{{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- endfor %}
{%- endif %}
{%- if message.role == 'assistant' %}{{- '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
WORDS = r"[A-Za-z]+|[\s\S]"
"""A token is a word or lies in one; each other character is a token."""

VOCABULARY = 512
HEADS = 4


async def demonstrated_texts(config: Config, count: int) -> list[str]:
    """All texts of the demonstrations of the first tasks: prompts, targets, and the answers to them."""
    assert config.agent.environment is not None
    stream, make = training_tasks(config), load_environment(config.agent.environment, config.agent.options)
    chosen, texts = config.agent.tool_format, list[str]()
    for ordinal in range(count):
        texts += await _played(make(), stream.task_at(ordinal), "hermes" if chosen == "auto" else chosen)
    return texts


async def _played(environment: Environment, task: Task, tool_format: ToolFormat) -> list[str]:
    said = [str(message["content"]) for message in await environment.reset(task)]
    for turn in task.data["target"]:
        observed = await environment.step(Action(turn, calls_in(turn, tool_format)))
        said += [turn, *(str(message["content"]) for message in observed.messages)]
    await environment.close()
    return said


def write_tiny_model(
    folder: str | Path,
    texts: Iterable[str],
    pieces: Sequence[str] = (),
    least: int = 1,
    hidden_size: int = 64,
    layers: int = 3,
    max_length: int = 1024,
) -> None:
    """Write a Hugging Face folder: a Qwen3 of some 0.2M parameters, and the tokenizer of `save_tokenizer`."""
    from transformers import Qwen3Config

    tokenizer = save_tokenizer(folder, texts, pieces, least)
    # Of a Qwen2, transformers would replace the way the tokenizer splits texts.
    shape = text_shape(tokenizer, hidden_size, layers, max_length)
    Qwen3Config(architectures=["Qwen3ForCausalLM"], **shape).save_pretrained(folder)


def save_tokenizer(
    folder: str | Path, texts: Iterable[str], pieces: Sequence[str] = (), least: int = 1
) -> PreTrainedTokenizerBase:
    """A tokenizer with a chat template, and the settings of generation that go with it.

    The words of `texts` become tokens, the most frequent ones whole; others are spelled. Each of `pieces` is one.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.decoder = decoders.Fuse()
    alphabet = [*map(chr, range(32, 127)), "\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(pieces),
        min_frequency=least,
        special_tokens=[PAD, END, UNKNOWN, *ROLES],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    ends = {"eos_token_id": wrapped.eos_token_id, "pad_token_id": wrapped.pad_token_id}
    GenerationConfig(**ends).save_pretrained(folder)
    return wrapped


def text_shape(
    tokenizer: PreTrainedTokenizerBase, hidden_size: int = 64, layers: int = 3, max_length: int = 1024
) -> dict[str, Any]:
    """The configuration of a decoder for this tokenizer."""
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": hidden_size // HEADS,
        "intermediate_size": 3 * hidden_size,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
