"""An agent that learns to use a tool: products of three-digit numbers, which so small a model cannot compute.

    user        412*650
    assistant   <tool_call>{"name": "multiply", "arguments": {"a": 412, "b": 650}}</tool_call>
    tool        267800
    assistant   267800

    python examples/calculator_agent.py          # one to two minutes on two CPU cores

A model of random weights is shown some such conversations, until it gets about a fifth of the products right, and is
then trained by reinforcement learning in separate processes. What the tool says is in the context, but not trained on.
"""

import random
import sys
from pathlib import Path

import asyncrl

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": '
AND, CLOSE = ', "b": ', "}}</tool_call>"
CONFIG = Path(__file__).with_suffix(".yaml")
TEMPLATE = """\
{%- if tools %}{{- '<|tools|>' }}{%- endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content }}
{%- if message.role == 'assistant' %}{{- '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def tasks(count=20000, seed=0):
    """Rows; 'target' is what to say in each turn, for the warm-up alone."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(100, 1000), draw.randrange(100, 1000)) for _ in range(count)]
    return [
        {
            "prompt": f"{a}*{b}",
            "answer": str(a * b),
            "target": [f"{CALL}{a}{AND}{b}{CLOSE}", str(a * b)],
        }
        for a, b in pairs
    ]


def held_out():
    return tasks(count=200, seed=1)


def reward(task, text, rollout):
    """text: what the policy said in its last turn."""
    return float(rollout.finish == "stop" and text == task.data["answer"])


def write_model_folder(folder):
    """A configuration of 0.2M parameters, and a tokenizer of one token a letter or fixed piece of a call."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config

    roles = ["<|tools|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    pieces = ["<|pad|>", "<|end|>", "<|unknown|>", *roles, *"0123456789*"]
    words = models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<|unknown|>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in (CALL, AND, CLOSE)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=roles,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    end = pieces.index("<|end|>")
    Qwen2Config(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=192,
        vocab_size=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=0,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    GenerationConfig(eos_token_id=end, pad_token_id=0).save_pretrained(folder)


def warm_up(words):
    """Shows conversations to a new model. Returns its folder. words: as those of `main`"""
    from asyncrl.config.load import load_config
    from asyncrl.offline.process import train_supervised

    folder = Path(load_config(CONFIG, ["model.path=unused", *words]).run.dir) / "calculator-model"
    write_model_folder(folder / "random")
    warm = [f"model.path={folder / 'random'}", f"sft.output={folder / 'warm'}", *words]
    train_supervised(load_config(CONFIG, warm))
    return folder / "warm"


def main(words):
    """words: further settings, as on the command line. Returns the summary of the run."""
    summary = asyncrl.train(CONFIG, [f"model.path={warm_up(words)}", *words])
    start, end = summary["heldout_accuracy_start"], summary["heldout_accuracy_end"]
    print(f"held-out products right: {start:.2f} -> {end:.2f} in {summary['train_s']:.0f} s")
    return summary


if __name__ == "__main__":
    main(sys.argv[1:])
