"""The policy and its tokenizer, loaded the same way by both pools.

Everything is read from disk or from the local hub cache: nothing is downloaded at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.sync.bucket import layout_of
from asyncrl.sync.families import Heads, Shapes
from asyncrl.sync.layout import whole_layout
from asyncrl.sync.names import Fused, Names, checkpoint_layout
from asyncrl.types import Array

Loaded = TypeVar("Loaded")

transformers.utils.logging.disable_progress_bar()  # the log of a process is lines

STACKED = [(MergeModulelist, 0)]
STACKED_ROWS = [(MergeModulelist, 0), (Concatenate, 1)]
"""What transformers does to the experts of a checkpoint: stacks them, after it put gate and up together by rows."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def load_causal_lm(
    model: ModelConfig, seed: int, attention: str = "sdpa", key: str = "model.path"
) -> PreTrainedModel:
    """The policy on the CPU, in `model.dtype` and in eval mode.

    A folder with config.json and no weights gives random weights: the same on every process under one `seed`,
    and torch's own generator is left as it was. `attention` names an entry of transformers' attention
    registry, made before this call. Raises ConfigError (of `key`, the setting that named the path) if there is no
    such model, or if its attention does not go through the registry.
    """
    config = load_config(model, key)
    dtype = getattr(torch, model.dtype)
    if has_weights(model.path):
        loaded = _read(
            model,
            lambda: AutoModelForCausalLM.from_pretrained(
                model.path, config=config, attn_implementation=attention, dtype=dtype, **_where(model)
            ),
            key,
        )
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loaded = _read(
                model,
                lambda: AutoModelForCausalLM.from_config(
                    config,
                    attn_implementation=attention,
                    dtype=dtype,
                    trust_remote_code=model.trust_remote_code,
                ),
                key,
            )
    _check_attention(model, loaded, attention, key)
    return loaded.eval()


def load_config(model: ModelConfig, key: str = "model.path") -> PretrainedConfig:
    """The model's config.json alone. Raises ConfigError as `load_causal_lm` does."""
    return _read(model, lambda: AutoConfig.from_pretrained(model.path, **_where(model)), key)


def checkpoint_names(config: PretrainedConfig) -> Names:
    """How a model's parameters in memory are called in its checkpoint."""
    fused, renamed = [], []
    for rule in get_checkpoint_conversion_mapping(config.get_text_config().model_type) or ():
        steps = [(type(step), getattr(step, "dim", None)) for step in getattr(rule, "operations", ())]
        if isinstance(rule, WeightConverter) and steps in (STACKED, STACKED_ROWS):
            fused.append(Fused(rule.target_patterns[0], tuple(rule.source_patterns)))
        elif (
            isinstance(rule, WeightRenaming) and rule.source_patterns[0].replace("_", "").strip(".").isalnum()
        ):
            renamed.append((rule.target_patterns[0], rule.source_patterns[0]))
    return Names(tuple(fused), tuple(renamed))


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A whole model's live parameters, tied ones once, in checkpoint names: views, where transformers fuses them."""
    inside = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _, views = checkpoint_layout(layout_of(inside), checkpoint_names(model.config))
    return {there: inside[name][view.index] for there, ((name, view),) in views.items()}


def checkpoint_shapes(model: ModelConfig) -> tuple[Shapes, Heads]:
    """Of the parameters in the checkpoint, tied ones once, in `model.dtype`: read off config.json alone.

    Raises ConfigError as `load_causal_lm` does.
    """
    config = load_config(model)
    text = config.get_text_config()
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    inside = whole_layout({name: (p.shape, model.dtype) for name, p in network.named_parameters()})
    layout, _ = checkpoint_layout(inside, checkpoint_names(config))
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_rows = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = Heads(text.num_attention_heads * head_rows, key_heads * head_rows, key_heads)
    return {name: (param.shape, param.dtype) for name, param in layout.items()}, heads


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model. Raises ConfigError (key model.path) if there is none."""
    tokenizer = _read(model, lambda: AutoTokenizer.from_pretrained(model.path, **_where(model)))
    if not tokenizer.encode("0123 abc", add_special_tokens=False):  # transformers makes an empty one up
        raise ConfigError("model.path", model.path, "has no tokenizer files", "copy tokenizer.json there")
    return tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]]) -> Array:
    """[P] int64. Text is taken as it is; messages go through the chat template."""
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=False)
    else:
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    return np.array(ids, np.int64)


def _where(model: ModelConfig) -> dict[str, bool]:
    return {"local_files_only": True, "trust_remote_code": model.trust_remote_code}


def has_weights(path: str) -> bool:
    """A hub name always has weights; a folder may hold a config.json alone."""
    folder = Path(path)
    return not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


def _read(model: ModelConfig, read: Callable[[], Loaded], key: str = "model.path") -> Loaded:
    try:
        return read()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            key,
            model.path,
            f"cannot be loaded ({str(error).splitlines()[0]})",
            "give a folder with config.json and tokenizer files, or a hub name fetched with `hf download`",
        ) from error


def _check_attention(model: ModelConfig, loaded: PreTrainedModel, attention: str, key: str) -> None:
    built_in = attention in ("eager", "sdpa")
    in_use = loaded.config._attn_implementation
    if in_use == attention and (built_in or loaded._supports_attention_backend):
        return
    raise ConfigError(
        key,
        model.path,
        f"{type(loaded).__name__} does not take its attention from transformers' registry (uses {in_use!r})",
        "use a model whose class has _supports_attention_backend, e.g. Qwen2, Qwen3, Llama or GPT-2",
    )
