"""Loads models and tokenizers in the same way for generators and learners.

Everything is read from disk or from the local hub cache; nothing is downloaded at run time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from torch import nn
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

from asyncrl.config.rules import require
from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.sync.layout.layout import whole_layout
from asyncrl.sync.layout.names import Fused, Names, checkpoint_layout
from asyncrl.sync.layout.predicted_sharding import Heads, Shapes
from asyncrl.sync.tensors.shards import layout_of
from asyncrl.telemetry.bars import bars_wanted

Loaded = TypeVar("Loaded")

if not bars_wanted():
    transformers.utils.logging.disable_progress_bar()

STACKED = [(MergeModulelist, 0)]
STACKED_ROWS = [(MergeModulelist, 0), (Concatenate, 1)]
"""transformers' operations on the experts of a checkpoint: stack them; the second also joins gate and up by rows."""

LITERAL = re.compile(r"\^?([\w.]+)(\(\?!.*\))?")
"""A transformers pattern that matches one literal part of a name, with an optional negative lookahead."""

CAUSAL_LMS = AutoModelForCausalLM._model_mapping
"""The model class of each configuration class of language models."""

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Types of model that transformers does not know by these names, and its own type of the same architecture."""

LAYERS = {"full_attention", "sliding_attention", "linear_attention"}
"""Values of `layer_types` in config.json whose layers see the tokens of their own document alone."""

MIXES_TOKENS = re.compile("Conv1d|ShortConv|Mamba|Delta|LinearAtt|Lightning|Rglru|Rwkv|Indexer|Compressor")
"""Parts of the names of module classes that look at other tokens by convolutions, recurrent states or an index; those
in `delta_nets` are known."""

DEQUANTIZED = ("fp8", "mxfp4")
"""Methods of quantization whose weights transformers converts back."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def load_causal_lm(
    model: ModelConfig, seed: int, attention: str | None = None, key: str = "model.path"
) -> PreTrainedModel:
    """Load a causal language model on the CPU, in `model.dtype` and in eval mode.

    A folder with config.json and no weights gives random weights, which are equal on every process under one `seed`; so
    is the head of `model.scores` where the checkpoint lacks one. torch's own generator does not change.

    attention: an entry of transformers' attention registry, made before this call; None: as transformers chooses ·
    key: of the path, for errors

    Raises ConfigError if there is no such model, its attention does not use the registry, or its weights are quantized
    by a method other than DEQUANTIZED.
    """
    config = load_model_config(model, key)
    _dequantize(config, model, key)
    dtype = getattr(torch, model.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if has_weights(model.path):
            loaded = read_model(
                model,
                lambda: _auto_class(model, config).from_pretrained(
                    model.path, config=config, attn_implementation=attention, dtype=dtype, **_where(model)
                ),
                key,
            )
        else:
            loaded = _made(model, config, attention, key)
    return _checked(model, loaded, attention, key)


def _dequantize(config: PretrainedConfig, model: ModelConfig, key: str) -> None:
    """Have transformers convert quantized weights to `model.dtype` as it reads them. By default it does so only where
    the GPU cannot multiply them."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    method = settings.get("quant_method")
    rule = f"has weights quantized by {method}, which cannot be trained"
    remedy = "give a checkpoint in bfloat16"
    require(method in DEQUANTIZED, key, model.path, rule, remedy)
    settings["dequantize"] = True


def empty_causal_lm(
    model: ModelConfig, attention: str | None = None, key: str = "model.path"
) -> PreTrainedModel:
    """As `load_causal_lm` of a checkpoint, with its tensors on the meta device in the dtype that they would have.
    Computed buffers, such as rotary frequencies, have values."""
    config = load_model_config(model, key)
    dtype = getattr(torch, model.dtype)
    with torch.device("meta"):
        empty = _made(model, config, attention, key)
    _keep_float32(empty, dtype)
    _compute_buffers(empty)
    with suppress(OSError):  # the folder has none
        empty.generation_config = GenerationConfig.from_pretrained(model.path, local_files_only=True)
    return _checked(model, empty, attention, key)


def load_classifier(model: ModelConfig, key: str = "model.path") -> PreTrainedModel:
    """Load a sequence classifier on the CPU, in `model.dtype` and in eval mode. Raises ConfigError if there is no such
    model, or its checkpoint has no head, which would then be random."""
    read = AutoModelForSequenceClassification.from_pretrained
    dtype = getattr(torch, model.dtype)
    loaded, info = read_model(
        model, lambda: read(model.path, dtype=dtype, output_loading_info=True, **_where(model)), key
    )
    if missing := sorted(info["missing_keys"]):
        rule = f"lacks {missing[0]}, which a {type(loaded).__name__} has"
        raise ConfigError(key, model.path, rule, "give the folder of a reward model with its head")
    return loaded.eval()


def text_body(causal_lm: PreTrainedModel) -> PreTrainedModel:
    """The decoder below the head; in a model for images too, that of its language model."""
    body = causal_lm.get_decoder() if _has_parts(causal_lm.config) else causal_lm.base_model
    return cast(PreTrainedModel, body)


def towers(causal_lm: PreTrainedModel) -> list[torch.nn.Module]:
    """The parts that text does not pass through, such as a vision tower."""
    body = text_body(causal_lm)
    beside = causal_lm.base_model.children() if _has_parts(causal_lm.config) else ()
    return [part for part in beside if part is not body]


def load_model_config(model: ModelConfig, key: str = "model.path") -> PretrainedConfig:
    """Read the model's config.json. Raises ConfigError as `load_causal_lm`."""
    return read_model(model, lambda: _config_of(model), key)


def _config_of(model: ModelConfig) -> PretrainedConfig:
    found, _ = PretrainedConfig.get_config_dict(model.path, local_files_only=True)
    if (known := SAME_AS.get(found.get("model_type", ""))) is not None:
        return AutoConfig.for_model(**{**found, "model_type": known})
    return AutoConfig.from_pretrained(model.path, **_where(model))


def checkpoint_names(config: PretrainedConfig) -> Names:
    """The names in a checkpoint of a model's parameters, without the rules for which `renames_oddly` is true."""
    rules = [_translated(rule) for rule in _rules(config)]
    fused = tuple(rule for rule in rules if isinstance(rule, Fused))
    # transformers' rules lead from the checkpoint to memory; these lead back.
    renamed = tuple(rule for rule in reversed(rules) if isinstance(rule, tuple))
    return Names(fused, renamed)


def renames_oddly(config: PretrainedConfig) -> bool:
    """Whether transformers changes names or tensors in a way that `Names` cannot express."""
    return any(_translated(rule) is None for rule in _rules(config))


def body_prefix(config: PretrainedConfig) -> str | None:
    """The prefix of all names of a checkpoint but the head's; None for a model with code of its own."""
    made = _class(config)
    return None if made is None else str(made.base_model_prefix)


def tied_names(config: PretrainedConfig) -> set[str]:
    """The parameters that config.json ties to others (the head), which checkpoints may lack."""
    tied = getattr(_class(config), "_tied_weights_keys", None) or ()
    return set(tied) if getattr(config, "tie_word_embeddings", False) else set()


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A whole model's live parameters in checkpoint names, tied ones once; views where transformers fuses them."""
    inside = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _, views = checkpoint_layout(layout_of(inside), checkpoint_names(model.config))
    return {there: inside[name][view.index] for there, ((name, view),) in views.items()}


def checkpoint_shapes(model: ModelConfig) -> tuple[Shapes, Heads]:
    """The shapes of a checkpoint's parameters, tied ones once, in `model.dtype`, and of its attention heads.

    Only config.json is read. Raises ConfigError as `load_causal_lm`.
    """
    config = load_model_config(model)
    text = config.get_text_config()
    with torch.device("meta"):
        network = auto_class(config).from_config(config, trust_remote_code=model.trust_remote_code)
    inside = whole_layout({name: (p.shape, model.dtype) for name, p in network.named_parameters()})
    layout, _ = checkpoint_layout(inside, checkpoint_names(config))
    key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_rows = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = Heads(text.num_attention_heads * head_rows, key_heads * head_rows, key_heads)
    return {name: (param.shape, param.dtype) for name, param in layout.items()}, heads


def load_tokenizer(model: ModelConfig, key: str = "model.path") -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model. Raises ConfigError if there is none."""
    tokenizer = read_model(model, lambda: AutoTokenizer.from_pretrained(model.path, **_where(model)), key)
    if not tokenizer.encode("0123 abc", add_special_tokens=False):  # transformers returns an empty one
        raise ConfigError(key, model.path, "has no tokenizer files", "copy tokenizer.json there")
    return tokenizer


def _where(model: ModelConfig) -> dict[str, bool]:
    return {"local_files_only": True, "trust_remote_code": model.trust_remote_code}


def has_weights(path: str) -> bool:
    """Whether the path is a hub name, which always has weights, or a folder with weights."""
    folder = Path(path)
    return not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


def read_model(model: ModelConfig, read: Callable[[], Loaded], key: str = "model.path") -> Loaded:
    """The value of `read` at the model's path. Raises ConfigError if it cannot."""
    try:
        return read()
    except (OSError, ValueError, KeyError) as error:
        rule = f"cannot be loaded ({_why(model.path, error)})"
        raise ConfigError(key, model.path, rule, _instead(model.path)) from error


def _why(path: str, error: Exception) -> str:
    """The reason of a failed load. transformers takes a missing path for the name of a model."""
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


def auto_class(config: PretrainedConfig) -> Any:
    """The class that loads the model. A model for images and text is used for text only."""
    images = type(config) in AutoModelForImageTextToText._model_mapping or type(config) not in CAUSAL_LMS
    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def _auto_class(model: ModelConfig, config: PretrainedConfig) -> Any:
    """The same for a model that may score texts."""
    if not model.scores:
        return auto_class(config)
    config.num_labels = 1
    return AutoModelForSequenceClassification


def _made(model: ModelConfig, config: PretrainedConfig, attention: str | None, key: str) -> PreTrainedModel:
    """Make a model from its configuration, with random weights."""
    return read_model(
        model,
        lambda: _auto_class(model, config).from_config(
            config,
            attn_implementation=attention,
            dtype=getattr(torch, model.dtype),
            trust_remote_code=model.trust_remote_code,
        ),
        key,
    )


def _keep_float32(empty: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the tensors that transformers always loads in float32, such as DeepSeek-V3's biases of routers."""
    plan = empty._get_dtype_plan(dtype)
    for name, tensor in empty.state_dict(keep_vars=True).items():
        for pattern, kept in plan.items():
            if re.search(pattern.replace("*", ".*"), name):
                tensor.data = tensor.data.to(kept)


def _compute_buffers(empty: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint has, by the model's own initialisation, which skips the meta device."""
    for name, buffer in list(empty.named_non_persistent_buffers()):
        where, _, own = name.rpartition(".")
        module = empty.get_submodule(where)
        module._buffers[own] = torch.empty_like(buffer, device="cpu")
        cast(Any, module)._is_hf_initialized = False
    empty.initialize_weights()


def _class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The model class of a configuration; None for a model with code of its own."""
    return cast("type[PreTrainedModel] | None", auto_class(config)._model_mapping.get(type(config), None))


def _rules(config: PretrainedConfig) -> list[Any]:
    """transformers' rules from the checkpoint to memory, for the class or else for the type of text model."""
    made = _class(config)
    own = get_checkpoint_conversion_mapping(made.__name__) if made is not None else None
    return _kept(own or get_checkpoint_conversion_mapping(config.get_text_config().model_type) or [])


def _kept(rules: Sequence[Any]) -> list[Any]:
    """The rules without those that turn a model for images into a text model: here it stays whole."""
    return [rule for rule in rules if getattr(rule, "prefix_to_remove", None) != "language_model"]


def _translated(rule: Any) -> Fused | tuple[str, str] | None:
    """A transformers rule in terms of `Names`: fused experts, or (in memory, in the checkpoint); None: not possible."""
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


def _checked(model: ModelConfig, loaded: PreTrainedModel, attention: str | None, key: str) -> PreTrainedModel:
    """In eval mode. Raises ConfigError for a model that does not use the registry's attention, or looks at other tokens
    in another way too, and for one for images whose checkpoint names cannot be computed."""
    in_use, plain = loaded.config._attn_implementation, attention in (None, "eager", "sdpa")
    other = [] if plain else _other_layers(loaded)
    require(
        not other,
        key,
        model.path,
        f"{type(loaded).__name__} looks at other tokens in a way of its own ({', '.join(other)}): rollouts that "
        "are packed into one sequence would see each other",
        "use a family of docs/models.md",
    )
    require(
        plain or (in_use == attention and bool(loaded._supports_attention_backend or delta_nets(loaded))),
        key,
        model.path,
        f"{type(loaded).__name__} does not take its attention from transformers' registry (uses {in_use!r})",
        "use a model whose class has _supports_attention_backend, e.g. Qwen2, Qwen3, Llama or GPT-2",
    )
    rules = _kept(get_model_conversion_mapping(loaded, add_legacy=False) if _has_parts(loaded.config) else ())
    require(
        all(_translated(rule) is not None for rule in rules),
        key,
        model.path,
        f"{type(loaded).__name__} renames its checkpoint's parameters, which the weight stream does not support",
        "use a text model, Qwen2.5-VL or Qwen3-VL",
    )
    for tower in () if plain else towers(loaded):
        cast(PreTrainedModel, tower).set_attn_implementation("sdpa")  # it attends within an image
    return loaded.eval()


def _other_layers(loaded: PreTrainedModel) -> list[str]:
    """The kinds of layers, and the module classes, that look at other tokens in ways that packing does not know."""
    kinds = set(getattr(loaded.config.get_text_config(), "layer_types", None) or ()) - LAYERS
    body = text_body(loaded)
    inside = {part for layer in delta_nets(body) for part in layer.modules()}
    classes = {type(module).__name__ for module in body.modules() if module not in inside}
    return sorted(kinds | {name for name in classes if MIXES_TOKENS.search(name)})


def delta_nets(network: nn.Module) -> list[nn.Module]:
    """The gated delta nets of Qwen3-Next and Qwen3.5, in transformers' implementation."""
    return [module for module in network.modules() if type(module).__name__.endswith("GatedDeltaNet")]
