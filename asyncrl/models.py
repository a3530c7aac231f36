"""The policy and its tokenizer, loaded the same way by both pools.

Everything is read from disk or from the local hub cache: nothing is downloaded at run time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import jinja2
import numpy as np
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from asyncrl.config.schema import Config, ModelConfig
from asyncrl.config.sections.tasks import keys_of_messages
from asyncrl.errors import ConfigError, TaskError
from asyncrl.sync.layout.hf_sharding import Heads, Shapes
from asyncrl.sync.layout.layout import whole_layout
from asyncrl.sync.layout.names import Fused, Names, checkpoint_layout
from asyncrl.sync.tensors.bucket import layout_of
from asyncrl.telemetry.bars import bars_wanted
from asyncrl.types import Array, Task

Loaded = TypeVar("Loaded")

if not bars_wanted():
    transformers.utils.logging.disable_progress_bar()

STACKED = [(MergeModulelist, 0)]
STACKED_ROWS = [(MergeModulelist, 0), (Concatenate, 1)]
"""What transformers does to the experts of a checkpoint: stacks them, after it put gate and up together by rows."""

LITERAL = re.compile(r"\^?([\w.]+)(\(\?!.*\))?")
"""A pattern of transformers' that stands for a part of a name; it may say after what else it is no match."""

CAUSAL_LMS = AutoModelForCausalLM._model_mapping
"""Configurations of language models."""

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
            lambda: _auto_class(config).from_pretrained(
                model.path, config=config, attn_implementation=attention, dtype=dtype, **_where(model)
            ),
            key,
        )
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loaded = _made(model, config, attention, key)
    return _checked(model, loaded, attention, key)


def empty_causal_lm(model: ModelConfig, attention: str = "sdpa", key: str = "model.path") -> PreTrainedModel:
    """`load_causal_lm` of a checkpoint without its tensors: all that it has is on the meta device, in the dtype that it
    would be loaded in. Buffers that are computed, such as rotary frequencies, are there."""
    config = load_config(model, key)
    dtype = getattr(torch, model.dtype)
    with torch.device("meta"):
        empty = _made(model, config, attention, key)
    _keep_float32(empty, dtype)
    _compute_buffers(empty)
    with suppress(OSError):  # a folder without one
        empty.generation_config = GenerationConfig.from_pretrained(model.path, local_files_only=True)
    return _checked(model, empty, attention, key)


def load_classifier(model: ModelConfig, key: str = "model.path") -> PreTrainedModel:
    """A sequence classifier on the CPU, in `model.dtype` and in eval mode. Raises ConfigError (of `key`) if there is no
    such model, or if its weights are those of something else, which would leave it a random head."""
    read = AutoModelForSequenceClassification.from_pretrained
    dtype = getattr(torch, model.dtype)
    loaded, told = _read(
        model, lambda: read(model.path, dtype=dtype, output_loading_info=True, **_where(model)), key
    )
    if missing := sorted(told["missing_keys"]):
        raise ConfigError(
            key,
            model.path,
            f"lacks {missing[0]}, which a {type(loaded).__name__} has",
            "give the folder of a reward model with its head",
        )
    return loaded.eval()


def text_body(causal_lm: PreTrainedModel) -> PreTrainedModel:
    """What text goes through on its way to the head; of a model for images too its language model alone."""
    body = causal_lm.get_decoder() if _has_parts(causal_lm.config) else causal_lm.base_model
    return cast(PreTrainedModel, body)


def load_config(model: ModelConfig, key: str = "model.path") -> PretrainedConfig:
    """The model's config.json alone. Raises ConfigError as `load_causal_lm` does."""
    return _read(model, lambda: AutoConfig.from_pretrained(model.path, **_where(model)), key)


def checkpoint_names(config: PretrainedConfig) -> Names:
    """How a model's parameters in memory are called in its checkpoint, as far as that can be said: `renames_oddly`."""
    said = [_said(rule) for rule in _rules(config)]
    fused = tuple(one for one in said if isinstance(one, Fused))
    # transformers goes from the checkpoint to memory; this is the way back.
    renamed = tuple(one for one in reversed(said) if isinstance(one, tuple))
    return Names(fused, renamed)


def renames_oddly(config: PretrainedConfig) -> bool:
    """Whether transformers changes names, or what is called by them, in a way that `Names` does not know."""
    return any(_said(rule) is None for rule in _rules(config))


def body_prefix(config: PretrainedConfig) -> str | None:
    """What the names of a checkpoint begin with, but for the head's; none for code that comes with a model."""
    made = _class(config)
    return None if made is None else str(made.base_model_prefix)


def tied_names(config: PretrainedConfig) -> set[str]:
    """Parameters that config.json ties to others, so that a checkpoint need not have them: the head."""
    tied = getattr(_class(config), "_tied_weights_keys", None) or ()
    return set(tied) if getattr(config, "tie_word_embeddings", False) else set()


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
        network = _auto_class(config).from_config(config, trust_remote_code=model.trust_remote_code)
    inside = whole_layout({name: (p.shape, model.dtype) for name, p in network.named_parameters()})
    layout, _ = checkpoint_layout(inside, checkpoint_names(config))
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_rows = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = Heads(text.num_attention_heads * head_rows, key_heads * head_rows, key_heads)
    return {name: (param.shape, param.dtype) for name, param in layout.items()}, heads


def load_tokenizer(model: ModelConfig, key: str = "model.path") -> PreTrainedTokenizerBase:
    """The tokenizer beside the model. Raises ConfigError (of `key`) if there is none."""
    tokenizer = _read(model, lambda: AutoTokenizer.from_pretrained(model.path, **_where(model)), key)
    if not tokenizer.encode("0123 abc", add_special_tokens=False):  # transformers makes an empty one up
        raise ConfigError(key, model.path, "has no tokenizer files", "copy tokenizer.json there")
    return tokenizer


def policy_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer that prompts are framed with: the one beside the policy, with `tasks.chat_template` if that is set.

    Raises ConfigError if there is none, and for a chat template that the configuration needs and that is not there,
    or that is none.
    """
    tokenizer = load_tokenizer(config.model)
    if config.tasks.chat_template is not None:
        tokenizer.chat_template = _template(config.tasks.chat_template, tokenizer)
    for key, value in keys_of_messages(config.tasks, config.evaluation):
        if not tokenizer.chat_template:
            raise _without_template(key, value, tokenizer)
    return tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, task: Task) -> Array:
    """[P] int64. Text is taken as it is; messages go through the chat template.

    Raises ConfigError for messages if there is no template, TaskError for those that it does not take.
    """
    if isinstance(task.prompt, str):
        return np.array(tokenizer.encode(task.prompt, add_special_tokens=False), np.int64)
    if not tokenizer.chat_template:
        raise _without_template("tasks.chat_template", None, tokenizer)
    try:
        ids = tokenizer.apply_chat_template(
            task.prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template is a program
        why = f"{type(error).__name__}: {error}"
        raise TaskError(
            f"task {task.ordinal}: its messages do not go through the chat template ({why})"
        ) from error
    return np.array(ids, np.int64)


def _template(path: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a chat template that can be rendered."""
    try:
        template = Path(path).read_text(encoding="utf-8")
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "0"}],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
    except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
        raise ConfigError(
            "tasks.chat_template",
            path,
            f"is no chat template: {getattr(error, 'strerror', None) or error}",
            "give the path of a Jinja file, such as the chat_template.jinja of another model",
        ) from None
    return template


def _without_template(key: str, value: object, tokenizer: PreTrainedTokenizerBase) -> ConfigError:
    return ConfigError(
        key,
        value,
        f"prompts that are messages need a chat template, and the tokenizer of {tokenizer.name_or_path} has none",
        "set tasks.chat_template=FILE, or use an instruction-tuned model",
    )


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
            f"cannot be loaded ({_why(model.path, error)})",
            _instead(model.path),
        ) from error


def _why(path: str, error: Exception) -> str:
    """transformers takes a path that is not there for the name of a model."""
    if Path(path).exists():
        return str(error).splitlines()[0]
    if not _may_be_of_hub(path):
        return "there is no such folder" + ("" if path.startswith(("/", "~")) else f" in {Path.cwd()}")
    return (
        f"there is neither such a folder in {Path.cwd()} nor such a model in the local hub cache; asyncrl downloads "
        "nothing at run time"
    )


def _may_be_of_hub(path: str) -> bool:
    return not Path(path).exists() and not path.startswith(("/", ".", "~")) and path.count("/") <= 1


def _instead(path: str) -> str:
    folder = "give a folder with config.json and tokenizer files"
    if not _may_be_of_hub(path):
        return f"{folder}, or a hub name fetched with `hf download NAME`"
    return f"fetch it with `hf download {path}`, or {folder}"


def _auto_class(config: PretrainedConfig) -> Any:
    """A model for images and text is used for its text alone."""
    return AutoModelForCausalLM if type(config) in CAUSAL_LMS else AutoModelForImageTextToText


def _made(model: ModelConfig, config: PretrainedConfig, attention: str, key: str) -> PreTrainedModel:
    """From its configuration alone."""
    return _read(
        model,
        lambda: _auto_class(config).from_config(
            config,
            attn_implementation=attention,
            dtype=getattr(torch, model.dtype),
            trust_remote_code=model.trust_remote_code,
        ),
        key,
    )


def _keep_float32(empty: PreTrainedModel, dtype: torch.dtype) -> None:
    """What transformers loads in float32 whatever the dtype: DeepSeek-V3's biases of routers."""
    plan = empty._get_dtype_plan(dtype)
    for name, tensor in empty.state_dict(keep_vars=True).items():
        for pattern, kept in plan.items():
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(kept)


def _compute_buffers(empty: PreTrainedModel) -> None:
    """Those that no checkpoint has, by the model's own initialisation, which leaves the meta device as it is."""
    for name, buffer in list(empty.named_non_persistent_buffers()):
        where, _, own = name.rpartition(".")
        module = empty.get_submodule(where)
        module._buffers[own] = torch.empty_like(buffer, device="cpu")
        cast(Any, module)._is_hf_initialized = False
    empty.initialize_weights()


def _class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """What is made of a configuration; none where its code comes with it."""
    return cast("type[PreTrainedModel] | None", _auto_class(config)._model_mapping.get(type(config), None))


def _rules(config: PretrainedConfig) -> list[Any]:
    """transformers' rules from the checkpoint to memory: those of the class, or else of the kind of text model."""
    made = _class(config)
    own = get_checkpoint_conversion_mapping(made.__name__) if made is not None else None
    return own or get_checkpoint_conversion_mapping(config.get_text_config().model_type) or []


def _said(rule: Any) -> Fused | tuple[str, str] | None:
    """What a rule says, as `Names` has it: experts that are fused, or (in memory, in the checkpoint)."""
    if isinstance(rule, WeightConverter):
        steps = [(type(step), getattr(step, "dim", None)) for step in rule.operations]
        known = steps in (STACKED, STACKED_ROWS)
        return Fused(rule.target_patterns[0], tuple(rule.source_patterns)) if known else None
    if added := getattr(rule, "prefix_to_add", None):  # a `PrefixChange`
        return f"{rule.model_prefix}.{added}.", f"{rule.model_prefix}."
    found = LITERAL.fullmatch(rule.source_patterns[0]) if type(rule) is WeightRenaming else None
    return (rule.target_patterns[0], found[1]) if found else None


def _has_parts(config: PretrainedConfig) -> bool:
    return config.get_text_config() is not config


def _checked(model: ModelConfig, loaded: PreTrainedModel, attention: str, key: str) -> PreTrainedModel:
    _check_attention(model, loaded, attention, key)
    _check_parts(model, loaded, key)
    return loaded.eval()


def _check_parts(model: ModelConfig, loaded: PreTrainedModel, key: str) -> None:
    """Models for images are known whose parameters can be called as in their checkpoints."""
    if not _has_parts(loaded.config):
        return
    if any(_said(rule) is None for rule in get_model_conversion_mapping(loaded, add_legacy=False)):
        raise ConfigError(
            key,
            model.path,
            f"{type(loaded).__name__} renames the parameters of its checkpoint, which the weight stream does not know",
            "use a text model, Qwen2.5-VL or Qwen3-VL",
        )


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
